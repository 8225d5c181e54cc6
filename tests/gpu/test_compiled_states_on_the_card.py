"""Triton kernels that code optimizer states give the codes of torch's operators on the card, and take less time. Skips where there is no card."""

import pytest
import torch

from tightfit.techniques.optimizer.states.kernel_codec import KernelCodec
from tightfit.techniques.optimizer.states.state_codecs import AbstractCodec, BlockCodec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no card that torch can use on this machine"),
]
NAMES = ("exp_avg", "exp_avg_sq")


def milliseconds(codec: AbstractCodec, value: torch.Tensor) -> float:
    """Of coding and restoring it once, on the card."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for turn in range(4):
        if turn == 1:
            begin.record()
        codec.decode("exp_avg", codec.encode("exp_avg", value), value.shape, value.dtype)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 3


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_codes_are_those_of_the_operators(bits: int, dtype: torch.dtype) -> None:
    notes: list[str] = []
    value = torch.randn(1031, 4099, device="cuda", dtype=dtype).pow(5)
    codec, plain = KernelCodec(bits, value, notes.append), BlockCodec(bits)
    for name in NAMES:
        given = value.abs() if name == "exp_avg_sq" else value
        coded, expected = codec.encode(name, given), plain.encode(name, given)
        assert torch.equal(coded.main, expected.main)
        assert torch.equal(coded.rest, expected.rest)
        restored = codec.decode(name, coded, given.shape, dtype)
        assert torch.equal(restored, plain.decode(name, expected, given.shape, dtype))
    assert notes == []


@pytest.mark.parametrize("bits", [8, 4])
def test_kernels_take_less_time_and_memory(bits: int, capsys: pytest.CaptureFixture[str]) -> None:
    value = torch.randn(8192, 8192, device="cuda")
    codec = KernelCodec(bits, value, print)
    compiled, operators = milliseconds(codec, value), milliseconds(BlockCodec(bits), value)
    with capsys.disabled():
        print(f"\n{bits} bits, 64 Mi numbers: {compiled:.3f} ms compiled, {operators:.3f} ms by operators")
    assert compiled < operators
    # What was tried out before is no part of it.
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    codec.encode("exp_avg", value)
    assert torch.cuda.max_memory_allocated() - before < 1.1 * codec.num_bytes(value.shape, value.dtype) + (1 << 20)
