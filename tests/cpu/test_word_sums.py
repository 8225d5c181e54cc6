"""Checks sum all bits of a tensor without a converted copy of it."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tightfit.effects.values import fingerprints, word_sums
from tightfit.effects.values.word_sums import sum_of_words, sums_of_columns, wide_sum

TENSORS = {
    "words": torch.randn(64, 64),
    "halves": torch.randn(64, 64).bfloat16(),
    "odd halves": torch.randn(63, 63).half(),
    "at an odd place": torch.randn(65 * 64 + 1).bfloat16()[1:].view(65, 64),
    "strided": torch.randn(64, 64)[:, ::2],
    "expanded": torch.randn(64, 1).expand(64, 8),
    "one number": torch.tensor(3.0),
    "complex": torch.randn(9, dtype=torch.complex64),
    "booleans": torch.rand(77) < 0.5,
    "channels last": torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last),
    "doubles": torch.randn(5, dtype=torch.float64),
    # Contiguous, whatever the stride of a dimension of one is.
    "a dimension of one": torch.randn(4, 64).as_strided((4, 1, 64), (64, 1, 1)),
    "one row": torch.randn(64).as_strided((1, 64), (1, 1)),
}


class Largest(TorchDispatchMode):
    """The largest result that is not a view, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # What a card converts before it sums it, which no operator shows.
        if func.overloadpacket.__name__ == "sum":
            dtype = (kwargs or {}).get("dtype")
            converts = dtype is not None and dtype != args[0].dtype
            self.num_bytes = max(self.num_bytes, args[0].numel() * dtype.itemsize if converts else 0)
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view and not result._is_view():
            self.num_bytes = max(self.num_bytes, result.numel() * result.element_size())
        return result


@pytest.mark.parametrize("name", TENSORS)
def test_the_sum_is_that_of_all_words_and_every_bit_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = TENSORS[name]
    whole = sum_of_words(tensor)
    monkeypatch.setattr(word_sums, "PIECE", 16)
    assert torch.equal(sum_of_words(tensor), whole)
    other = tensor.clone(memory_format=torch.preserve_format)
    flat = other.view(-1) if other.is_contiguous() else other.as_strided((other.numel(),), (1,))
    flat[3 % len(flat)] = ~flat[3 % len(flat)] if flat.dtype == torch.bool else flat[3 % len(flat)] + 1
    assert not torch.equal(sum_of_words(other), sum_of_words(tensor.clone(memory_format=torch.preserve_format)))


@pytest.mark.parametrize("name", ["a dimension of one", "one row", "strided", "expanded"])
def test_a_fingerprint_is_made_of_the_bits_and_not_of_the_strides(name: str) -> None:
    tensor = TENSORS[name]
    assert torch.equal(
        fingerprints._bits(tensor), fingerprints._bits(tensor.clone(memory_format=torch.contiguous_format))
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_columns", [4096, 4095])
def test_no_check_holds_a_wider_copy(dtype: torch.dtype, num_columns: int) -> None:
    tensor = torch.randn(2048, num_columns).to(dtype)
    piece = 8 << 20
    assert tensor.numel() * 8 > 4 * piece
    for look in (sum_of_words, sums_of_columns, fingerprints._bits, lambda t: wide_sum(t, torch.float64)):
        with Largest() as largest:
            look(tensor)
        assert largest.num_bytes <= piece
