"""Buffers that count: bfloat16 has no number between 256 and 258, so a count by ones would stop there without a word."""

import dataclasses
from collections.abc import Iterable

import torch

from tightfit.capture.processes.process_role import is_simulated
from tightfit.techniques.wrappers.first_order import Refuse, are_transforms_active

_LAST = 256.0
# Counts for each class, expert or entry of a codebook; what is larger is a table.
_MOST = 1 << 16


@dataclasses.dataclass(slots=True, kw_only=True)
class _Count:
    """`before` is what there was when it was last looked at."""

    name: str
    buffer: torch.Tensor
    version: int
    before: torch.Tensor | None = None


class CountingBuffers:
    """Those of few elements that are in bfloat16; `check` is to be called after each forward. What has had a value that is no integer is no count."""

    def __init__(self, buffers: Iterable[tuple[str, torch.Tensor]]) -> None:
        few = ((name, buffer) for name, buffer in buffers if buffer.dim() and 0 < buffer.numel() <= _MOST)
        self._counts = [_Count(name=name, buffer=b, version=b._version) for name, b in few if b.dtype == torch.float32]

    def check(self, refuse: Refuse, technique: str) -> None:
        """Raises where a count has come to the last number that is right.

        Raises:
            ApplyError: one has.
        """
        # Looked at where it was written to: on a card the host waits for its value.
        written = [each for each in self._counts if each.version != each.buffer._version]
        if not written or is_simulated() or are_transforms_active() or torch.compiler.is_compiling():
            return
        for count in written:
            now, before = count.buffer.detach().float(), count.before
            count.version, count.before = count.buffer._version, now
            is_count, is_full = _looked_at(now, before)
            if not is_count:
                self._counts.remove(count)
            elif is_full and count.buffer.dtype == torch.bfloat16:
                raise refuse(
                    f"the buffer {count.name} counts in bfloat16, which cannot represent 257; leave {technique} out "
                    "of the plan"
                )


def _looked_at(now: torch.Tensor, before: torch.Tensor | None) -> tuple[bool, bool]:
    """Whether all are integers, and one has come to the last number by a step that the next one, as large, would not be added to it any more."""
    with torch.no_grad():
        are_integers = (now == now.round()).all()
        if before is None or before.shape != now.shape:
            return bool(are_integers), False
        size, step = now.abs(), (now - before).abs()
        # Half of the last bit of a number is more than a 512th of it. One element that is at the end already stays there.
        is_at_end = (size >= _LAST) & ((step > 0) & (step <= size / _LAST) | (now.numel() == 1))
        found = torch.stack([are_integers, is_at_end.any()]).tolist()
        return found[0], found[1]
