"""Low-bit states by Triton kernels: what is taken where, what is compared before, and the kernels themselves where Triton is installed."""

import importlib.util
import sys
import types

import pytest
import torch
from tests.cpu.optimizer_training import traced
from tests.forked_python import forked_python

from tightfit.analysis.profile import Profile
from tightfit.devices.catalogue import find
from tightfit.techniques.optimizer.low_bit_states import LowBitStates
from tightfit.techniques.optimizer.states.kernel_codec import KernelCodec
from tightfit.techniques.optimizer.states.state_codecs import BlockCodec, Encoded

HOST = torch.device("cpu")
NAME = "tightfit.techniques.optimizer.states.block_kernels"


def stand_in(bits, *, loses_nan=False, fails=False):
    """What the kernels do, by `BlockCodec`."""
    plain = BlockCodec(bits)

    def name_of(table):
        return "exp_avg" if table[0] < 0 else "exp_avg_sq"

    def encode(flat, borders, codes, scales):
        if fails:
            raise RuntimeError("Failed to find C compiler.\nPlease specify it")
        found = plain.encode(name_of(borders), flat.nan_to_num() if loses_nan else flat)
        codes.copy_(found.main)
        scales.copy_(found.rest)

    def decode(codes, scales, table, flat):
        flat.copy_(plain.decode(name_of(table), Encoded(main=codes, rest=scales), flat.shape, flat.dtype))

    module = types.ModuleType(NAME)
    module.encode, module.decode = encode, decode
    return module


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ({}, ""),
        ({"loses_nan": True}, "they encode torch.float32 differently"),
        ({"fails": True}, "Failed to find C compiler.)"),
    ],
)
def test_kernels_are_compared_with_operators_before_they_are_used(bits, faults, said, monkeypatch):
    monkeypatch.setitem(sys.modules, NAME, stand_in(bits, **faults))
    monkeypatch.setattr("tightfit.techniques.optimizer.states.block_kernels", sys.modules[NAME], raising=False)
    notes = []
    works = KernelCodec(bits, torch.zeros(1), notes.append)._is_tried_out(HOST, torch.float32)
    assert works == (not said)
    assert [said in note for note in notes] == ([True] if said else [])


@pytest.mark.parametrize("bits", [8, 4])
def test_the_host_takes_operators_without_a_word(bits):
    notes = []
    codec, value = KernelCodec(bits, torch.zeros(1), notes.append), torch.randn(41, 131)
    coded, expected = codec.encode("exp_avg", value), BlockCodec(bits).encode("exp_avg", value)
    assert torch.equal(coded.main, expected.main)
    assert torch.equal(coded.rest, expected.rest)
    restored = codec.decode("exp_avg", coded, value.shape, value.dtype)
    assert torch.equal(restored, BlockCodec(bits).decode("exp_avg", expected, value.shape, value.dtype))
    assert notes == []


def test_each_direction_is_one_kernel_on_the_virtual_gpu():
    tape = traced(
        num_blocks=8,
        technique="tightfit.techniques.optimizer.low_bit_states:LowBitStates",
        settings="bits:8+compiled:True",
    )
    names = [tape.strings[n] for n in tape.operators.name.tolist()]
    # Two states of each matrix in each of the steps.
    assert names.count("tightfit.encode_blocks") >= names.count("tightfit.decode_blocks") > 0
    assert "aten.bucketize.Tensor" not in names
    # What is ours is known, and nothing that is assumed of a program's own operators.
    assert not [each for each in tape.assumptions if "tightfit." in each.what]


def test_kernels_are_planned_for_nvidia_and_take_less_time():
    plain = traced(num_blocks=8)
    compiled, not_compiled = (
        next(o for o in LowBitStates().options(Profile(plain, find(device))) if o.settings["bits"] == 4)
        for device in ("A100 80GB", "MI210")
    )
    assert compiled.settings == {"bits": 4, "compiled": True}
    assert not_compiled.settings == {"bits": 4}
    # Of which most is the update itself, tensor by tensor; the MI210 has 0.8 of the bandwidth.
    assert compiled.seconds < 0.3 * not_compiled.seconds


# Not in bfloat16, which Triton's interpreter cuts off where a GPU rounds.
INTERPRETED = """
import torch
from tightfit.techniques.optimizer.states.kernel_codec import KernelCodec
for bits in (8, 4):
    for dtype in (torch.float32, torch.float16):
        print(KernelCodec(bits, torch.zeros(1), print)._is_tried_out(torch.device("cpu"), dtype))
"""


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (torch's wheels for GPUs bring it)"
)
def test_the_kernels_code_as_the_operators_do(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    script = tmp_path / "interpreted.py"
    script.write_text(INTERPRETED)
    assert forked_python(str(script), cwd=tmp_path).stdout.split() == ["True"] * 4
