"""The loss head in chunks: the same loss and gradients in every way that models come to a loss, and no logits where none are needed."""

import copy
import functools
from typing import Any

import pytest
import torch
from tests.cpu.loss_head_models import LOSSES, WHOLE_LOSSES, Plain, batch, choice
from tests.cpu.optimizer_training import DEVICE, peak_bytes

from tightfit.analysis.profile import Profile
from tightfit.devices.catalogue import find
from tightfit.errors import ApplyError
from tightfit.fit import capture
from tightfit.tape import Tape
from tightfit.techniques.loss_head.chunked_loss import ChunkedLoss
from tightfit.techniques.loss_head.deferred_logits import DeferredLogits
from tightfit.techniques.session import Session

BOTH_PASSES = pytest.mark.parametrize("gradients_in", ["forward", "backward"])
MODELS = f"{__file__.rpartition('/')[0]}/loss_head_models.py"


def _pair(model: torch.nn.Module, where: str, **settings: Any) -> tuple[torch.nn.Module, torch.nn.Module, Session]:
    """The model as it is, and a copy with the technique on it."""
    other = copy.deepcopy(model)
    session = Session(model=other, optimizers=[])
    ChunkedLoss().apply(session, [choice(where, **({"num_chunks": 4, "gradients_in": "forward"} | settings))])
    return model, other, session


def _assert_same_gradients(plain: torch.nn.Module, other: torch.nn.Module, **tolerances: float) -> None:
    # Sums over tokens and classes are taken in another order; nothing else differs.
    largest = max(p.grad.abs().max().item() for p in plain.parameters() if p.grad is not None)
    within = {"rtol": 1e-4, "atol": 3e-6 * largest} | tolerances
    for (name, a), b in zip(plain.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, **within, msg=lambda m, n=name: f"{n}: {m}")


@BOTH_PASSES
@pytest.mark.parametrize(("loss", "tied"), [("flat", False), *((loss, True) for loss in LOSSES)])
def test_loss_and_gradients_are_those_of_the_plain_model(loss, tied, gradients_in):
    torch.manual_seed(0)
    plain, other, session = _pair(Plain(loss, tied=tied, bias=not tied), "Plain.head", gradients_in=gradients_in)
    for step in range(2):
        expected, found = plain(*batch(step))[1], other(*batch(step))[1]
        torch.testing.assert_close(found, expected)
        expected.backward()
        found.backward()
    _assert_same_gradients(plain, other)
    assert bool(session.statistics["logits computed whole"]) == (loss in WHOLE_LOSSES)


@BOTH_PASSES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_are_as_near_to_the_truth_as_the_plain_model(dtype, gradients_in):
    torch.manual_seed(0)
    truth = Plain(tied=False, bias=True)
    truth(*batch(0))[1].backward()
    plain, other, _ = _pair(copy.deepcopy(truth).to(dtype), "Plain.head", gradients_in=gradients_in)
    scale = 1024.0  # as a loss scaler would
    for model in (plain, other):
        model.zero_grad()
        (model(*batch(0))[1] * scale).backward()

    def error(model):
        return [
            ((p.grad / scale).float() - q.grad).norm() / q.grad.norm()
            for p, q in zip(model.parameters(), truth.parameters(), strict=True)
        ]

    for mine, theirs in zip(error(other), error(plain), strict=True):
        # In half precision each slice of the vocabulary rounds its share of the hidden states' gradient.
        assert mine <= 1.5 * theirs + 1e-6


@BOTH_PASSES
def test_autocast_is_kept(gradients_in):
    torch.manual_seed(0)
    plain, other, session = _pair(Plain(tied=False), "Plain.head", gradients_in=gradients_in)
    for model in (plain, other):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits, loss = model(*batch(0))
        assert logits.dtype == torch.bfloat16
        loss.backward()
    _assert_same_gradients(plain, other, rtol=2e-2, atol=3e-4)
    assert session.statistics["losses in chunks"] == 1


@BOTH_PASSES
def test_a_graph_that_is_kept_gives_the_same_gradients_twice(gradients_in):
    plain, other, _ = _pair(Plain(), "Plain.head", gradients_in=gradients_in)
    for model in (plain, other):
        loss = model(*batch(0))[1]
        (3 * loss).backward(retain_graph=True)
        loss.backward()
    _assert_same_gradients(plain, other)


def test_a_frozen_head_and_a_batch_that_is_ignored_whole():
    model = Plain(tied=False)
    model.head.requires_grad_(False)
    plain, other, _ = _pair(model, "Plain.head")
    for targets in (batch(0)[1], torch.full((3, 21), -1)):
        losses = []
        for each in (plain, other):
            each.zero_grad()
            losses.append(each(batch(0)[0], targets)[1])
            losses[-1].backward()
        torch.testing.assert_close(losses[1], losses[0], equal_nan=True)
        _assert_same_gradients(plain, other)
    assert other.head.weight.grad is None


def test_logits_are_an_ordinary_tensor_to_whoever_looks_at_them():
    plain, other, session = _pair(Plain(), "Plain.head")
    expected, found = plain(*batch(0))[0], other(*batch(0))[0]
    assert isinstance(found, DeferredLogits)
    assert (found.shape, found.dtype, found.device, found.stride()) == (
        expected.shape,
        expected.dtype,
        expected.device,
        expected.stride(),
    )
    assert found.requires_grad
    assert not found.is_leaf
    assert session.statistics["logits computed whole"] == 0
    torch.testing.assert_close(found.argmax(-1), expected.argmax(-1))
    torch.testing.assert_close(found[0, -1].topk(3).values, expected[0, -1].topk(3).values)
    torch.testing.assert_close(found.detach().numpy(), expected.detach().numpy())
    assert repr(found).startswith("tensor([[[")


def test_gradients_of_the_logits_can_be_asked_for():
    plain, other, _ = _pair(Plain(), "Plain.head")
    gradients = []
    for model in (plain, other):
        logits = model.head(model.middle(model.table(batch(0)[0])))
        logits.retain_grad()
        LOSSES["flat"](logits, batch(0)[1]).backward()
        gradients.append(logits.grad)
    torch.testing.assert_close(gradients[1], gradients[0])
    _assert_same_gradients(plain, other)


@pytest.mark.parametrize("shape", [(1, 8), (16, 64)])
def test_logits_can_be_read_after_the_optimizer_has_stepped_but_not_a_step_later(shape):
    torch.manual_seed(0)
    model = Plain()
    results = []
    for technique in (False, True):
        each = copy.deepcopy(model)
        optimizer = torch.optim.SGD(each.parameters(), lr=1.0)
        session = Session(model=each, optimizers=[optimizer])
        if technique:
            ChunkedLoss().apply(session, [choice("Plain.head", num_chunks=2, gradients_in="forward")])
        logits, loss = each(*batch(0, shape=shape))
        loss.backward()
        optimizer.step()
        results.append(logits.detach())
    torch.testing.assert_close(results[1], results[0])
    late, loss = each(*batch(1, shape=(16, 64)))
    loss.backward()
    optimizer.step()
    each(*batch(2))
    with pytest.raises(ApplyError, match="read after the next step has begun"):
        late.sum()


def test_nothing_is_deferred_without_gradients_or_in_evaluation():
    _, model, _ = _pair(Plain(), "Plain.head")
    with torch.no_grad():
        assert type(model(*batch(0))[0]) is torch.Tensor
    model.eval()
    assert type(model(*batch(0))[0]) is torch.Tensor


def test_a_copy_of_the_model_uses_its_own_weight():
    _, model, _ = _pair(Plain(), "Plain.head")
    average = copy.deepcopy(model)
    average(*batch(0))[1].backward()
    assert average.table.weight.grad is not None
    assert model.table.weight.grad is None


def test_undone_the_head_is_as_it_was():
    _, model, session = _pair(Plain(), "Plain.head")
    session.undo()
    assert "forward" not in vars(model.head)
    assert type(model(*batch(0))[0]) is torch.Tensor


def test_what_is_no_linear_layer_is_refused():
    model = Plain()
    with pytest.raises(ApplyError, match=r"needs a torch\.nn\.Linear"):
        ChunkedLoss().apply(
            Session(model=model, optimizers=[]), [choice("Plain.table", num_chunks=2, gradients_in="forward")]
        )
    assert not any("forward" in vars(module) for module in model.modules())


def _hugging_face(kind: str) -> tuple[torch.nn.Module, str]:
    transformers = pytest.importorskip("transformers")
    small: dict[str, Any] = {"vocab_size": 211, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, **small)
        return transformers.GPT2LMHeadModel(config), "GPT2LMHeadModel.lm_head"
    if kind == "t5":
        config = transformers.T5Config(
            d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0, vocab_size=211
        )
        return transformers.T5ForConditionalGeneration(config), "T5ForConditionalGeneration.lm_head"
    if kind == "bert":
        config = transformers.BertConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=211
        )
        return transformers.BertForMaskedLM(config), "BertForMaskedLM.cls.predictions.decoder"
    layers = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    if kind == "gemma2":
        config = transformers.Gemma2Config(head_dim=16, final_logit_softcapping=2.0, **layers, **small)
        return transformers.Gemma2ForCausalLM(config), "Gemma2ForCausalLM.lm_head"
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**layers, **small)), "LlamaForCausalLM.lm_head"


@BOTH_PASSES
@pytest.mark.parametrize("kind", ["gpt2", "llama", "t5", "bert", "gemma2"])
def test_unmodified_models_of_hugging_face(kind, gradients_in):
    torch.manual_seed(0)
    plain, other, session = _pair(*_hugging_face(kind), gradients_in=gradients_in)
    tokens = torch.randint(3, 211, (2, 16))
    labels = tokens.masked_fill(tokens % 3 == 0, -100)
    losses = []
    for model in (plain, other):
        model.train()
        torch.manual_seed(1)  # dropout
        losses.append(model(input_ids=tokens, labels=labels).loss)
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0])
    _assert_same_gradients(plain, other)
    assert session.statistics == {"losses in chunks": 1}


@functools.cache
def _traced(function: str = "workload", **parameters: Any) -> Tape:
    return capture(f"{MODELS}:{function}", device=DEVICE, parameters=[f"{k}={v}" for k, v in parameters.items()])


@pytest.mark.parametrize(("dtype", "loss"), [("float32", "flat"), ("bfloat16", "shifted")])
def test_the_promised_saving_is_the_traced_one(dtype, loss):
    plain = _traced(dtype=dtype, loss=loss)
    options = {tuple(o.settings.values()): o for o in ChunkedLoss().options(Profile(plain, find(DEVICE)))}
    assert set(options) == {(2, "forward"), (2, "backward"), (4, "forward"), (4, "backward")}
    before = peak_bytes(plain)
    for gradients_in in ("forward", "backward"):
        promised = before - peak_bytes(plain, [options[4, gradients_in]])
        traced = before - peak_bytes(_traced(dtype=dtype, loss=loss, num_chunks=4, gradients_in=gradients_in))
        assert promised == pytest.approx(traced, rel=0.03)
        assert traced > 0.5 * before


def test_more_chunks_save_more_and_the_backward_pass_costs_a_product_more():
    options = {tuple(o.settings.values()): o for o in ChunkedLoss().options(Profile(_traced(), find(DEVICE)))}
    peaks = {key: peak_bytes(_traced(), [option]) for key, option in options.items()}
    assert peaks[4, "forward"] < peaks[2, "forward"]
    assert peaks[4, "backward"] < peaks[2, "backward"]
    assert options[4, "backward"].seconds > options[4, "forward"].seconds


def test_an_evaluation_behind_the_step_is_no_part_of_the_loss():
    alone, with_evaluation = (
        {tuple(o.settings.values()): o for o in ChunkedLoss().options(Profile(tape, find(DEVICE)))}
        for tape in (_traced(), _traced(evaluates=True))
    )
    for key, option in alone.items():
        assert with_evaluation[key].seconds == pytest.approx(option.seconds, rel=0.02)


def test_a_small_head_is_not_offered():
    assert list(ChunkedLoss().options(Profile(_traced("classifier"), find(DEVICE)))) == []


def test_a_trace_may_end_within_a_forward_pass_before_the_head():
    assert list(ChunkedLoss().options(Profile(_traced("ends_before_the_head"), find(DEVICE))))


def test_the_class_of_the_logits_is_that_of_any_tensor():
    _, other, _ = _pair(Plain(), "Plain.head")
    logits: Any = other(*batch(0))[0]
    assert logits.__class__ is torch.Tensor
    assert {torch.Tensor: "tensor"}[type(logits)] == "tensor"
    assert type(logits) == torch.Tensor and type(logits) in (int, torch.Tensor)  # noqa: E721
    assert repr(type(logits)) == repr(torch.Tensor)


def test_code_that_asks_by_identity_for_the_class_of_a_tensor_is_refused_with_its_line():
    class Asking(Plain):
        def forward(self, *args: Any) -> Any:
            logits, loss = super().forward(*args)
            return logits, loss if type(logits) is torch.Tensor else 2 * loss

    _, other, _ = _pair(Asking(), "Asking.head")
    with pytest.raises(
        ApplyError, match=r"test_technique_chunked_loss.py:\d+ compares a tensor's type with torch.Tensor"
    ):
        other(*batch(0))


@pytest.mark.parametrize(
    "ask",
    [
        lambda logits, _: logits.retain_grad(),
        lambda logits, _: logits.register_hook(lambda g: g),
        lambda logits, _: logits.grad_fn,
        lambda logits, loss: torch.autograd.grad(loss, logits),
        lambda logits, loss: loss.backward(inputs=[logits]),
        lambda logits, _: torch.autograd.graph.get_gradient_edge(logits),
    ],
)
def test_gradients_of_logits_are_refused_once_their_loss_went_past_them(ask: Any):
    _, other, session = _pair(Plain(), "Plain.head")
    logits, loss = other(*batch(0))
    with pytest.raises(ApplyError, match="asks for the gradient of logits"):
        ask(logits, loss)
    assert session.verdict.failure is not None
