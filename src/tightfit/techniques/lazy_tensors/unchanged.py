"""Detects writes to tensors, also those that do not change their version (`.data`, numpy, another process)."""

from collections.abc import Iterable, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from tightfit.effects.values.contents import contents_of, is_any_written
from tightfit.effects.values.word_sums import sum_of_words

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""A type of as many bytes as an element has."""


class Contents:
    """The address, version and content of each of `tensors`, at construction; on a card the sum of its words stands for its content."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        # Wrapper subclasses have no storage of their own.
        self._tensors = [t for t in dict.fromkeys(tensors) if type(t) in _PLAIN and t.layout == torch.strided]
        self._places = [_place(tensor) for tensor in self._tensors]
        self._contents = contents_of(self._tensors)
        self._sums = self._sums_of_others()
        self._answer: bool | None = None

    def have_changed(self) -> bool:
        """Whether any of them was written to, or given other memory. Waits for the device."""
        self._answer = self._have_changed()
        return self._answer

    def had_changed(self) -> bool:
        """What `have_changed` has said, once; asked for now where that was not called since."""
        known, self._answer = self._answer, None
        return self._have_changed() if known is None else known

    def _have_changed(self) -> bool:
        if [_place(tensor) for tensor in self._tensors] != self._places:
            return True
        if is_any_written(self._contents, self._tensors):
            return True
        now = self._sums_of_others()
        return any(not torch.equal(now[device], before) for device, before in self._sums.items())

    def _sums_of_others(self) -> dict[torch.device, torch.Tensor]:
        """Of those whose contents cannot be read at once."""
        return _sums([t for t, content in zip(self._tensors, self._contents, strict=True) if content is None])


_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)


def _place(tensor: torch.Tensor) -> tuple[int, int, torch.Size]:
    version = -1 if tensor.is_inference() else tensor._version
    # A nested tensor has several shapes, and no sum over its bits: its version must do.
    shape = torch.Size() if tensor.is_nested else tensor.shape
    return (0 if isinstance(tensor, FakeTensor) else tensor.data_ptr()), version, shape


def _sums(tensors: Sequence[torch.Tensor]) -> dict[torch.device, torch.Tensor]:
    found: dict[torch.device, list[torch.Tensor]] = {}
    # A mode sees a number that autograd has saved (`2.5 * hidden`) as that number, of which there is no sum.
    with _disable_current_modes(), torch.no_grad(), torch.inference_mode(mode=False):
        for tensor in tensors:
            if not isinstance(tensor, FakeTensor) and tensor.device.type != "meta" and not tensor.is_nested:
                found.setdefault(tensor.device, []).append(sum_of_words(tensor))
        return {device: torch.stack(sums) for device, sums in found.items()}
