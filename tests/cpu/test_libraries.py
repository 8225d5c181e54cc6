"""Libraries that ask whether a tensor is a fake one are answered as on a card, and only if the workload imports them."""

import inspect
import types
from pathlib import Path

import pytest

from tightfit.capture.patches import libraries
from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.capture.trace import trace
from tightfit.tape import Category

transformers = pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.usefixtures("traces_import_libraries_themselves")

DECODER = '''
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def decoder():
    """A decoder whose batch is not padded, on a machine where only the kernel that takes no mask is allowed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, vocab_size=99
    )
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    tokens = torch.ones(2, 16, dtype=torch.int64, device="cuda")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        while True:
            loss = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens).loss
            loss.backward()
            yield


def padded():
    """A large batch of it, but the first token of one row is padding, so that the mask is needed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, vocab_size=99
    )
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    tokens = torch.ones(32, 512, dtype=torch.int64)
    mask = torch.ones_like(tokens)
    mask[0, 0] = 0
    while True:
        model(input_ids=tokens.cuda(), attention_mask=mask.cuda(), labels=tokens.cuda()).loss.backward()
        yield


def pretrained():
    """Weights that are read from a folder, straight to the card."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, vocab_size=99
    )
    LlamaForCausalLM(config).save_pretrained("base")
    model = LlamaForCausalLM.from_pretrained("base", dtype=torch.bfloat16, device_map="cuda")
    assert model.lm_head.weight.is_cuda and model.lm_head.weight.dtype == torch.bfloat16
    tokens = torch.ones(2, 16, dtype=torch.int64, device="cuda")
    while True:
        model(input_ids=tokens, labels=tokens).loss.backward()
        yield


def plain():
    model = torch.nn.Linear(4, 4).cuda()
    while True:
        model(torch.ones(2, 4, device="cuda")).sum().backward()
        yield
'''


def traced(function: str, folder: Path):
    (folder / "workload.py").write_text(DECODER)
    target = GeneratorFunction(location=str(folder / "workload.py"), function=function, parameters={})
    return trace(target, label=function, device="A100 80GB", num_steps=1).tape


def operators(tape) -> set[str]:
    return {tape.strings[name] for name in tape.operators.name}


def test_transformers_asks_what_is_answered():
    from transformers.masking_utils import is_tracing
    from transformers.utils import import_utils

    assert [str(name) for name in libraries.ANSWERS] == [f"{import_utils.__name__}.is_fake_tensor"]
    assert "is_fake_tensor(tensor)" in inspect.getsource(is_tracing)
    assert is_tracing.__globals__ is vars(import_utils)


def test_a_decoder_without_padding_has_no_causal_mask(tmp_path):
    assert "aten._scaled_dot_product_flash_attention" in operators(traced("decoder", tmp_path))


def test_a_decoder_with_padding_has_one(tmp_path):
    names = operators(traced("padded", tmp_path))
    assert "aten._scaled_dot_product_flash_attention" not in names
    assert "aten._scaled_dot_product_efficient_attention" in names


def test_weights_are_read_straight_to_the_card(tmp_path, monkeypatch):
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    tape = traced("pretrained", tmp_path)
    parameters = tape.storages.num_bytes[tape.storages.category == Category.PARAMETERS]
    # Each once, in bfloat16: two tables of 99 x 64, four projections of attention, three of the MLP, three norms; and the frequencies of the rotary
    # embedding in float32, twice.
    assert parameters.sum() == 2 * (2 * 99 * 64 + 4 * 64 * 64 + 3 * 64 * 64 + 3 * 64) + 2 * 4 * 16
    assert not (tmp_path / "base").exists()


def test_what_is_not_imported_is_left_alone(tmp_path):
    assert "transformers" not in traced("plain", tmp_path).versions


def test_a_folder_with_the_name_of_a_library_has_the_version_that_it_says_if_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "timm.py").write_text("__version__ = '0.9.0.dev0'\n")
    (tmp_path / "torchvision.py").write_text("__version__ = ''\n")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "workload.py").write_text("import timm, torchvision\n" + DECODER)
    target = GeneratorFunction(location=str(tmp_path / "workload.py"), function="plain", parameters={})
    versions = trace(target, label="plain", device="A100 80GB", num_steps=1).tape.versions
    assert (versions["timm"], versions["torchvision"]) == ("0.9.0.dev0", "")


def test_this_torch_has_every_function_that_the_card_answers(tmp_path):
    assert not [note for note in traced("plain", tmp_path).assumptions if note.where in ("torch", "transformers")]


@pytest.mark.parametrize(("version", "is_noted"), [("4.51.3", False), ("5.24.0", True)])
def test_a_function_that_a_later_release_lacks_is_noted(
    version: str, is_noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "version_of", lambda _library: version)
    notes = []
    module = types.ModuleType("transformers.utils.import_utils")
    libraries._answer(lambda where, what: notes.append(f"{where}: {what}"), module)
    expected = "transformers: transformers 5.24.0 has no transformers.utils.import_utils.is_fake_tensor, which is replaced to have masks built as on a card (5.0 to 5.23)"
    assert notes == ([expected] if is_noted else [])
