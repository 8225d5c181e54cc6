"""What is allocated at the end of each step, kept for a bounded number of steps."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from tightfit.runtime.leaks.process_memory import MallocUse

# The more of a long run is kept as every second, fourth, ... end of a step.
_MAX_ENDS = 256


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """What was allocated at the end of a step: live bytes by site and device, torch's counters of a card, and the process's own (None where not known)."""

    bytes_by_site: Mapping[int, int]
    bytes_by_device: Mapping[str, int]
    card_allocated: int
    card_reserved: int
    card_outside: int
    resident: int | None
    malloc: MallocUse | None


class StepEnds:
    """The ends of steps of one kind, thinned evenly."""

    def __init__(self) -> None:
        self.ends: list[StepEnd] = []
        self.stride = 1
        self.num_steps = 0

    def add(self, take: Callable[[], StepEnd]) -> None:
        """A step has ended."""
        if self.num_steps % self.stride == 0:
            self.ends.append(take())
        self.num_steps += 1
        if len(self.ends) == _MAX_ENDS:
            self.ends = self.ends[::2]
            self.stride *= 2


def beside_torch(ends: Sequence[StepEnd]) -> int:
    """By how many bytes the process has grown beside torch's tensors of the host since the first of `ends`, at least."""
    first, last = ends[0], ends[-1]
    malloced = mapped = 0
    if first.malloc is not None and last.malloc is not None:
        malloced = last.malloc.handed_out - first.malloc.handed_out - (_on_host(last) - _on_host(first))
        if first.resident is not None and last.resident is not None:
            mapped = (last.resident - last.malloc.of_system) - (first.resident - first.malloc.of_system)
    return max(malloced, mapped)


def _on_host(end: StepEnd) -> int:
    return end.bytes_by_device.get("cpu", 0)
