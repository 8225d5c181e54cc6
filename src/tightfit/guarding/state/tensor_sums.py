"""Checksums of tensors: code that writes to `tensor.data`, or through numpy, does so without being counted in the version of the tensor."""

from collections.abc import Iterator, Mapping

import torch

from tightfit.effects.values.word_sums import sum_of_words


class TensorSums:
    """The sums of the bits of each of these tensors, which are named, on its own device: nothing waits for them until they are compared."""

    def __init__(self, tensors: Mapping[int, tuple[str, torch.Tensor]], *, is_of_all: bool) -> None:
        self.is_of_all = is_of_all
        self.is_on_card = any(tensor.is_cuda for _, tensor in tensors.values())
        self._then = [(path, tensor, tensor._version, _sum(tensor)) for path, tensor in tensors.values()]

    def written_past(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those that have other bits now, and the same version."""
        for path, tensor, version, then in self._then:
            if tensor._version == version and not torch.equal(then, _sum(tensor)):
                yield path, tensor


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or not tensor.numel():
        return torch.zeros((), dtype=torch.int64)
    with torch.no_grad():
        return sum_of_words(tensor)
