"""Reads the contents of tensors on a card without waiting for it: a sum over the words of a tensor, which stays there until it is asked for.

Integers are summed, so the order in which a kernel adds does not matter and every bit counts: two tensors with other contents have other sums,
but for words that change places or whose changes cancel. At the host, where what is read is known at once, `effects.contents` does the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from tightfit.effects.word_sums import sum_of_words

DEVICE_TYPES = ("cuda",)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def sum_on_card(tensor: torch.Tensor) -> torch.Tensor | None:
    """The sum as an int64 tensor of no dimension on the card; None for what is not there, or of a class or layout of its own, and while a graph is captured."""
    if tensor.device.type not in DEVICE_TYPES or type(tensor) not in _PLAIN or tensor.layout != torch.strided:
        return None
    if not tensor.numel() or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    with _unseen():
        return sum_of_words(tensor)


def first_difference(ones: list[torch.Tensor], others: list[torch.Tensor]) -> int | None:
    """The number of the first pair of sums that differ; waits for the card."""
    with _unseen():
        # Blocks of a model may be on several cards.
        device = ones[0].device
        first, second = (torch.stack([each.to(device) for each in sums]) for sums in (ones, others))
        differ = first != second
        # One wait where all are equal.
        return int(differ.nonzero()[0]) if bool(differ.any()) else None


@contextmanager
def _unseen() -> Iterator[None]:
    """Runs operators of ours that no mode of the program's sees."""
    outside = _disable_current_modes() if _get_current_dispatch_mode_stack() else nullcontext()
    with torch.no_grad(), outside, torch._C.DisableTorchFunction():
        yield
