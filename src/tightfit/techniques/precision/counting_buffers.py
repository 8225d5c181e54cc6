"""Buffers that count: bfloat16 has no number between 256 and 258, so a count would stop there without a word."""

import dataclasses
from collections.abc import Iterable

import torch

from tightfit.capture.processes.process_role import is_simulated
from tightfit.techniques.wrappers.first_order import Refuse, are_transforms_active

_LAST = 256.0


@dataclasses.dataclass(slots=True, kw_only=True)
class _Count:
    name: str
    buffer: torch.Tensor
    version: int
    num_seen: int = 0


class CountingBuffers:
    """Those of one element that are in bfloat16; `check` is to be called after each forward. What has had a value that is no integer is no count."""

    def __init__(self, buffers: Iterable[tuple[str, torch.Tensor]]) -> None:
        ones = ((name, buffer) for name, buffer in buffers if buffer.dim() and buffer.numel() == 1)
        self._counts = [_Count(name=name, buffer=b, version=b._version) for name, b in ones if b.dtype == torch.float32]

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
            value = float(count.buffer.detach())
            count.version, count.num_seen = count.buffer._version, count.num_seen + 1
            if not value.is_integer():
                self._counts.remove(count)
            elif abs(value) >= _LAST and count.num_seen > 1 and count.buffer.dtype == torch.bfloat16:
                raise refuse(
                    f"the buffer {count.name} counts in bfloat16, which has no number between 256 and 258; leave {technique} out of the plan"
                )
