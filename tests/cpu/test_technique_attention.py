"""Attention by one kernel: the same results in every way that attention is written, scores where somebody looks at them, and none elsewhere."""

import copy
import functools
from typing import Any

import pytest
import torch
from tests.cpu.attention_models import WAYS, WHOLE_WAYS, Layer, choice
from tests.cpu.optimizer_training import DEVICE, peak_bytes
from torch.utils.checkpoint import checkpoint

from tightfit.analysis.profile import Profile
from tightfit.devices.catalogue import find
from tightfit.errors import ApplyError
from tightfit.fit import capture
from tightfit.tape import Tape
from tightfit.techniques.attention.attention_kernels import Attention
from tightfit.techniques.session import Session

MODELS = f"{__file__.rpartition('/')[0]}/attention_models.py"


@pytest.fixture
def kernel_calls(monkeypatch):
    """The calls of the kernel, counted."""
    calls = []
    kernel = torch.nn.functional.scaled_dot_product_attention

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args[0].shape)
        return kernel(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    return calls


def _pair(model: torch.nn.Module, *modules: str) -> tuple[torch.nn.Module, torch.nn.Module, Session]:
    other = copy.deepcopy(model)
    session = Session(model=other, optimizers=[])
    Attention().apply(session, [choice(*(modules or (type(model).__name__,)))])
    return model, other, session


def _assert_same_gradients(plain: torch.nn.Module, other: torch.nn.Module) -> None:
    for (name, a), b in zip(plain.named_parameters(), other.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("way", WAYS)
def test_results_and_gradients_are_those_of_the_plain_model(way, kernel_calls):
    torch.manual_seed(0)
    plain, other, _ = _pair(Layer(way))
    x = torch.randn(3, 12, 32)
    expected, found = plain(x), other(x)
    torch.testing.assert_close(found, expected)
    expected.square().mean().backward()
    found.square().mean().backward()
    _assert_same_gradients(plain, other)
    # One that looks at its weights, or does more to them than a kernel can, computes them.
    assert len(kernel_calls) == (way not in WHOLE_WAYS or way == "looked at")


def test_dropout_that_drops_is_left_alone_and_draws_the_same_numbers(kernel_calls):
    plain, other, _ = _pair(Layer(dropout=0.5))
    outputs = []
    for model in (plain, other):
        torch.manual_seed(3)
        outputs.append(model(torch.ones(2, 12, 32)))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=0)
    assert kernel_calls == []
    other.eval()(torch.ones(2, 12, 32))
    assert len(kernel_calls) == 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputing_in_the_backward_pass_takes_the_same_way(reentrant, kernel_calls):
    plain, other, _ = _pair(Layer())
    for model in (plain, other):
        torch.manual_seed(0)
        x = torch.randn(3, 12, 32, requires_grad=True)
        checkpoint(model, x, use_reentrant=reentrant).square().mean().backward()
    _assert_same_gradients(plain, other)
    assert len(kernel_calls) == 2


def test_autocast_and_half_precision_are_as_near_to_the_truth_as_the_plain_model(kernel_calls):
    torch.manual_seed(0)
    truth = Layer("added mask")
    x = torch.randn(3, 12, 32)
    exact = truth(x)
    plain, other, _ = _pair(truth)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        errors = [(model(x).float() - exact).norm() for model in (plain, other)]
    assert errors[1] <= 1.2 * errors[0]
    half_plain, half, _ = _pair(copy.deepcopy(truth).bfloat16())
    errors = [(model(x.bfloat16()).float() - exact).norm() for model in (half_plain, half)]
    assert errors[1] <= 1.2 * errors[0]
    assert len(kernel_calls) == 2


def test_a_row_that_is_masked_whole_stays_uniform():
    plain, other, _ = _pair(Layer("added mask"))
    for model in (plain, other):
        model.mask[3] = False
    x = torch.randn(3, 12, 32)
    torch.testing.assert_close(other(x), plain(x))


def test_undone_the_module_is_as_it_was(kernel_calls):
    _, other, session = _pair(Layer())
    session.undo()
    assert "forward" not in vars(other)
    other(torch.randn(1, 12, 32))
    assert kernel_calls == []


def test_a_result_that_is_written_to_in_place_is_refused_in_words():
    class Adding(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """As the convolution beside the attention of a Nystromformer."""
            y = (x @ x.mT).softmax(-1) @ x
            y += x
            return y

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), Adding())
    plain, other, _ = _pair(model, "Sequential.1")
    x = torch.randn(2, 3, 12, 32)
    plain(x).sum().backward()
    with pytest.raises(ApplyError, match="the output of attention is modified in place"):
        other(x).sum().backward()


def test_a_module_that_is_not_there_is_refused():
    model = torch.nn.Sequential(Layer())
    with pytest.raises(ApplyError, match="does not have"):
        Attention().apply(Session(model=model, optimizers=[]), [choice("Sequential.0", "Sequential.7")])
    assert "forward" not in vars(model[0])


@pytest.mark.parametrize("kind", ["llama", "bert", "gpt2"])
def test_eager_models_of_hugging_face(kind, kernel_calls):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    layers: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    if kind == "llama":
        config = transformers.LlamaConfig(num_key_value_heads=2, vocab_size=99, attn_implementation="eager", **layers)
        model = transformers.LlamaForCausalLM(config)
        places = [f"LlamaForCausalLM.model.layers.{i}.self_attn" for i in range(2)]
    elif kind == "bert":
        dropout = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
        config = transformers.BertConfig(vocab_size=99, attn_implementation="eager", **layers, **dropout)
        model = transformers.BertForMaskedLM(config)
        places = [f"BertForMaskedLM.bert.encoder.layer.{i}.attention.self" for i in range(2)]
    else:
        dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        config = transformers.GPT2Config(
            n_layer=2,
            n_embd=32,
            n_head=4,
            vocab_size=99,
            attn_implementation="eager",
            bos_token_id=1,
            eos_token_id=2,
            **dropout,
        )
        model = transformers.GPT2LMHeadModel(config)
        places = [f"GPT2LMHeadModel.transformer.h.{i}.attn" for i in range(2)]
    plain, other, _ = _pair(model.train(), *places)
    tokens, mask = torch.randint(3, 99, (2, 16)), torch.ones(2, 16, dtype=torch.int64)
    mask[1, 12:] = 0
    outs = [m(input_ids=tokens, attention_mask=mask, labels=tokens, output_attentions=True) for m in (plain, other)]
    torch.testing.assert_close(outs[1].loss, outs[0].loss)
    for out in outs:
        out.loss.backward()
    _assert_same_gradients(plain, other)
    assert len(kernel_calls) == 2
    torch.testing.assert_close(outs[1].attentions[1].sum(), outs[0].attentions[1].sum())


@functools.cache
def _traced(**parameters: Any) -> Tape:
    return capture(f"{MODELS}:workload", device=DEVICE, parameters=[f"{k}={v}" for k, v in parameters.items()])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_promised_saving_is_the_traced_one(dtype):
    plain = _traced(dtype=dtype)
    (option,) = Attention().options(Profile(plain, find(DEVICE)))
    assert option.settings["modules"] == ["Sequential.0", "Sequential.1", "Sequential.2"]
    assert option.needs_new_trace
    assert option.seconds < 0
    before = peak_bytes(plain)
    traced = before - peak_bytes(_traced(dtype=dtype, applied=1))
    assert before - peak_bytes(plain, [option]) == pytest.approx(traced, rel=0.1)
    assert traced > 0.4 * before


def test_nothing_is_offered_where_weights_are_dropped_or_a_kernel_runs_already():
    assert list(Attention().options(Profile(_traced(dropout=0.1), find(DEVICE)))) == []
    assert list(Attention().options(Profile(_traced(applied=1, dtype="bfloat16"), find(DEVICE)))) == []
