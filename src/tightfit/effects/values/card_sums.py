"""Reads the contents of tensors on a card without waiting for it: sums over the words of a tensor, which stay there until they are asked for.

Integers are summed, so the order in which a kernel adds does not matter and every bit counts: two tensors with other contents, or with the same in other
places, have other sums, but for changes that cancel. At the host, where what is read is known at once, `effects.contents` does the same.
"""

import itertools
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from tightfit.effects.values.word_sums import sums_of_columns

DEVICE_TYPES = ("cuda",)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def sums_on_card(tensor: torch.Tensor) -> torch.Tensor | None:
    """The sums as an int64 tensor of one dimension on the card; None for what is not there, or of a class or layout of its own, and while a graph is captured."""
    if type(tensor) not in _PLAIN or tensor.device.type not in DEVICE_TYPES or tensor.layout is not torch.strided:
        return None
    if not tensor.numel() or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    with unseen():
        return sums_of_columns(tensor)


def first_difference(ones: list[torch.Tensor], others: list[torch.Tensor]) -> int | None:
    """The number of the first pair of tensors of sums that differ; waits for the card."""
    with unseen():
        # Blocks of a model may be on several cards.
        device = ones[0].device
        first, second = (torch.cat([each.to(device) for each in sums]) for sums in (ones, others))
        differ = first != second
        # One wait where all are equal.
        if not bool(differ.any()):
            return None
        place, ends = int(differ.nonzero()[0]), itertools.accumulate(map(len, ones))
        return next(number for number, end in enumerate(ends) if place < end)


class unseen:  # noqa: N801 - used as torch's own `no_grad` is
    """Runs operators of ours, on tensors without a graph, that no mode of the program's sees. A class, as it is entered for each block of each step."""

    __slots__ = ("_contexts", "_outside")

    def __enter__(self) -> None:
        self._outside = None
        if _get_current_dispatch_mode_stack():
            self._outside = ExitStack()
            self._outside.enter_context(_disable_current_modes())
        self._contexts = torch._C.DisableTorchFunction()
        self._contexts.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._contexts.__exit__(*error)
        if self._outside is not None:
            self._outside.close()
