"""8-bit states coded by bitsandbytes: the real one where it is installed, and otherwise a stand-in with the same operators."""

import importlib
import importlib.util
import sys
import textwrap

import pytest
import torch
from tests.cpu.optimizer_training import DEVICE, choice, peak_bytes, traced

from tightfit.analysis.profile import Profile
from tightfit.devices.catalogue import find
from tightfit.errors import ApplyError
from tightfit.techniques.optimizer.low_bit_states import LowBitStates
from tightfit.techniques.optimizer.states import bitsandbytes_codec, state_sizes
from tightfit.techniques.optimizer.states.bitsandbytes_codec import BitsandbytesCodec
from tightfit.techniques.optimizer.states.state_codecs import BlockCodec
from tightfit.techniques.session import Session

pytestmark = pytest.mark.usefixtures("traces_import_libraries_themselves")

OURS = {"bits": 8}
THEIRS = {"bits": 8, "library": "bitsandbytes"}
IN_BACKWARD = {"in_backward": True, "clips": False}
IS_REAL = importlib.util.find_spec("bitsandbytes") is not None

# What bitsandbytes/_ops.py defines, computed in the plainest way.
STAND_IN = """
    import torch

    torch.library.define("bitsandbytes::quantize_blockwise", "(Tensor A, Tensor code, int blocksize) -> (Tensor, Tensor)")
    torch.library.define(
        "bitsandbytes::dequantize_blockwise",
        "(Tensor A, Tensor absmax, Tensor code, int blocksize, ScalarType dtype) -> Tensor",
    )

    @torch.library.impl("bitsandbytes::quantize_blockwise", "cpu")
    def quantize(A, code, blocksize):
        blocks = torch.nn.functional.pad(A.float(), (0, -A.numel() % blocksize)).view(-1, blocksize)
        absmax = blocks.abs().amax(1)
        distances = (blocks / absmax.clamp_min(1e-38)[:, None]).unsqueeze(-1).sub(code).abs()
        return distances.argmin(-1).to(torch.uint8).view(-1)[: A.numel()], absmax

    @torch.library.impl("bitsandbytes::dequantize_blockwise", "cpu")
    def dequantize(A, absmax, code, blocksize, dtype):
        return (code[A.int()] * absmax.repeat_interleave(blocksize)[: A.numel()]).to(dtype)

    @torch.library.register_fake("bitsandbytes::quantize_blockwise")
    def _(A, code, blocksize):
        return torch.empty_like(A, dtype=torch.uint8), A.new_empty(-(-A.numel() // blocksize), dtype=torch.float32)

    @torch.library.register_fake("bitsandbytes::dequantize_blockwise")
    def _(A, absmax, code, blocksize, dtype):
        return torch.empty_like(A, dtype=dtype)
"""


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory):
    """The library, importable here and in the processes that trace."""
    with pytest.MonkeyPatch.context() as patch:
        if not IS_REAL:
            folder = tmp_path_factory.mktemp("library")
            (folder / "bitsandbytes").mkdir()
            (folder / "bitsandbytes/__init__.py").write_text(textwrap.dedent(STAND_IN))
            (folder / "bitsandbytes-0.50.0.dist-info").mkdir()
            (folder / "bitsandbytes-0.50.0.dist-info/METADATA").write_text("Name: bitsandbytes\nVersion: 0.50.0\n")
            patch.syspath_prepend(str(folder))
            patch.setenv("PYTHONPATH", str(folder), prepend=":")
        importlib.invalidate_caches()
        yield
    if not IS_REAL:
        sys.modules.pop("bitsandbytes", None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_its_codes_are_ours_but_for_borders(name, dtype):
    value = torch.randn(41, 131, generator=torch.Generator().manual_seed(1)).mul(1e-3).to(dtype)
    value = value.abs() if name == "exp_avg_sq" else value
    value.view(-1)[:512] = 0
    theirs, ours = BitsandbytesCodec(value), BlockCodec(8)
    encoded, expected = theirs.encode(name, value), ours.encode(name, value)
    assert encoded.main.numel() == value.numel()
    torch.testing.assert_close(encoded.rest, expected.rest, rtol=0, atol=0)
    differ = (encoded.main != expected.main.view(-1)[: value.numel()]).view(-1)[512:]
    assert differ.float().mean() < 0.05
    restored = theirs.decode(name, encoded, value.shape, dtype)
    assert restored.dtype == dtype
    assert not restored.view(-1)[:512].any()
    of_ours = ours.decode(name, expected, value.shape, dtype)
    assert (restored - value).abs().max() <= 1.01 * (of_ours - value).abs().max()


@pytest.mark.parametrize("more", [{}, IN_BACKWARD])
@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_training_follows_that_with_our_own_codes(optimizer, more):
    ours = train_wide(OURS, optimizer)
    theirs = train_wide(THEIRS | more, optimizer)
    torch.testing.assert_close(torch.tensor(theirs[0]), torch.tensor(ours[0]), rtol=0.02, atol=1e-4)
    assert theirs[1].state_dict()["state"].keys() == ours[1].state_dict()["state"].keys()


def train_wide(settings, optimizer):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.Linear(96, 64))
    makes = {
        "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    }
    stepper = makes[optimizer](model.parameters())
    session = Session(model=model, optimizers=[stepper])
    LowBitStates().apply(session, [choice("low_bit_states", **settings)])
    losses = []
    for step in range(8):
        x = torch.randn(32, 64)
        loss = torch.nn.functional.mse_loss(model(x), x.roll(1, 1))
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        losses.append(loss.item())
        if step == 3:
            stepper.load_state_dict(stepper.state_dict())
    state = stepper.state[model[0].weight]["exp_avg" if optimizer != "sgd" else "momentum_buffer"]
    assert getattr(state, state.__tensor_flatten__()[0][0]).dtype == torch.uint8
    session.undo()
    assert losses[-1] < losses[0]
    return losses, stepper


@pytest.mark.parametrize("more", [{}, IN_BACKWARD])
def test_the_plan_names_it_and_promises_what_is_traced_with_fewer_kernels(more):
    plain = traced(num_blocks=8)
    # Where ours are not compiled.
    options = {tuple(o.settings.items()): o for o in LowBitStates().options(Profile(plain, find("MI210")))}
    theirs, ours = (options[tuple((settings | more).items())] for settings in (THEIRS, OURS))
    # A second backward pass takes as long with either.
    assert theirs.seconds < (1.0 if more else 0.5) * ours.seconds
    text = "+".join(f"{name}:{value}" for name, value in (THEIRS | more).items())
    actual = traced(num_blocks=8, technique="tightfit.techniques.optimizer.low_bit_states:LowBitStates", settings=text)
    saved = peak_bytes(plain) - peak_bytes(actual)
    assert peak_bytes(plain) - peak_bytes(plain, [theirs]) == pytest.approx(saved, rel=LowBitStates.tolerance)
    names = {actual.strings[n] for n in actual.operators.name.tolist()}
    assert {"bitsandbytes.quantize_blockwise", "bitsandbytes.dequantize_blockwise"} <= names


def test_where_it_is_not_installed_the_plan_is_refused_in_one_line(monkeypatch):
    for module in (bitsandbytes_codec, state_sizes):
        monkeypatch.setattr(module, "LIBRARY", "a-library-that-is-nowhere")
    model = torch.nn.Linear(128, 64)
    session = Session(model=model, optimizers=[torch.optim.Adam(model.parameters())])
    with pytest.raises(ApplyError, match=r"0\.46 or later, which is not installed here; install it, or make the plan"):
        LowBitStates().apply(session, [choice("low_bit_states", **THEIRS)])
    assert not any("library" in o.settings for o in LowBitStates().options(Profile(traced(num_blocks=8), find(DEVICE))))


def test_an_older_version_counts_as_none(monkeypatch):
    monkeypatch.setattr(bitsandbytes_codec.importlib.metadata, "version", lambda name: "0.45.5")
    assert not bitsandbytes_codec.is_installed()


def test_kernels_that_do_not_restore_are_refused(monkeypatch):
    decode = BitsandbytesCodec.decode
    monkeypatch.setattr(BitsandbytesCodec, "decode", lambda *args: decode(*args) + 0.1)
    with pytest.raises(ApplyError, match="does not decode on cpu what it encoded"):
        BitsandbytesCodec(torch.zeros(1))
