"""Checksums of weights: code that writes to `parameter.data` does so without being counted in the version of the parameter."""

from collections.abc import Sequence

import torch

from tightfit.effects.values.word_sums import sum_of_words


class WeightSums:
    """The sums of the bits of each parameter, on its own device: nothing waits for them until they are compared."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._sums = [_sum(parameter) for parameter in parameters]

    def changed(self) -> bool:
        """Whether a parameter has other bits now."""
        return any(not torch.equal(then, _sum(p)) for then, p in zip(self._sums, self._parameters, strict=True))


def _sum(parameter: torch.nn.Parameter) -> torch.Tensor:
    if parameter.layout != torch.strided or not parameter.numel():
        return torch.zeros((), dtype=torch.int64)
    with torch.no_grad():
        return sum_of_words(parameter)
