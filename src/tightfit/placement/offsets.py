"""The result of a solver, and a validator that shares no code with the solvers.

The validator sweeps over the begins and ends of lifetimes in time order and keeps the live buffers sorted by address.
"""

import bisect
import dataclasses
from collections.abc import Mapping

from tightfit.placement.buffers import Crowd, PlacementProblem


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSolution:
    """The offset of each buffer.

    `offsets` and `height` are in bytes; `crowd` is the time of the most live bytes, a lower bound of any height. `is_proven_optimal` says that no
    lower height exists, `is_proven_infeasible` that none exists within the capacity. `strategy` found the offsets; `seconds` were spent.
    """

    offsets: Mapping[str, int]
    height: int
    crowd: Crowd
    fits: bool
    is_proven_optimal: bool
    is_proven_infeasible: bool
    strategy: str
    seconds: float

    @property
    def lower_bound(self) -> int:
        """The peak of live bytes."""
        return self.crowd.num_bytes


def height_of(problem: PlacementProblem, offsets: Mapping[str, int]) -> int:
    """The end of the topmost buffer in bytes, without buffers of 0 bytes."""
    return max((offsets[buffer.name] + buffer.size for buffer in problem.buffers if buffer.size), default=0)


def faults(problem: PlacementProblem, offsets: Mapping[str, int]) -> list[str]:
    """A sentence for each fault of a placement; an empty list means: each buffer once, aligned, below the capacity, and no two live ones overlap."""
    names = {buffer.name for buffer in problem.buffers}
    found = [f"{name} has no offset" for name in sorted(names - offsets.keys())]
    found += [f"{name} is no buffer of the problem" for name in sorted(offsets.keys() - names)]
    placed = [(buffer, offsets[buffer.name]) for buffer in problem.buffers if buffer.name in offsets]
    for buffer, offset in placed:
        if offset < 0 or offset % problem.alignment:
            found.append(f"{buffer.name} is at {offset}, no multiple of {problem.alignment} from 0 up")
        if problem.capacity is not None and buffer.size and offset + buffer.size > problem.capacity:
            found.append(f"{buffer.name} ends at {offset + buffer.size}, above the capacity {problem.capacity}")
    # At the same time an end comes before a begin, since lifetimes are half-open.
    moments = [(buffer.upper, 0, index) for index, (buffer, _) in enumerate(placed) if buffer.size]
    moments += [(buffer.lower, 1, index) for index, (buffer, _) in enumerate(placed) if buffer.size]
    live: list[tuple[int, int, str]] = []
    for moment, is_birth, index in sorted(moments):
        buffer, offset = placed[index]
        entry = (offset, offset + buffer.size, buffer.name)
        if not is_birth:
            # Sorted by offset, though removal by value is linear: at most some hundred buffers are live at once.
            live.remove(entry)
            continue
        found += [
            f"{buffer.name} and {name} overlap at moment {moment}"
            for begin, end, name in live
            if begin < entry[1] and offset < end
        ]
        bisect.insort(live, entry)
    return found
