"""Checksums of weights: code that writes to `parameter.data` does so without being counted in the version of the parameter."""

from collections.abc import Sequence

import torch

# By bytes of an element. Sums of integers are the same in any order.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightSums:
    """The sums of the bits of each parameter, on its own device: nothing waits for them until they are compared."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._sums = [_sum(parameter) for parameter in parameters]

    def changed(self) -> bool:
        """Whether a parameter has other bits now."""
        return any(not torch.equal(then, _sum(p)) for then, p in zip(self._sums, self._parameters, strict=True))


def _sum(parameter: torch.nn.Parameter) -> torch.Tensor:
    value = parameter.detach()
    words = _WORDS.get(value.element_size())
    if words is None or value.layout != torch.strided or not value.numel():
        return torch.zeros((), dtype=torch.int64)
    with torch.no_grad():
        return (value if value.is_contiguous() else value.contiguous()).view(words).sum(dtype=torch.int64)
