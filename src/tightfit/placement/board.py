"""The constant tables of a search: which buffers overlap in time, and the sections (maximal sets of buffers that are live at once).

Only the order of begins and ends of lifetimes matters. A placement is valid exactly if the buffers of each section are stacked without overlap;
the tables below are numpy arrays of that. Sizes are in units of the alignment.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tightfit.placement.buffers import Buffer

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

FAR = np.int64(1 << 60)
"""Above every height: a mask for entries that do not count in a minimum."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """Tables over the n buffers and s sections of a problem.

    `sizes`, `lower`, `upper`: (n). `meets`: (n, n), which lifetimes overlap, itself included. `apart`: (n, n), 0 where two overlap and FAR elsewhere;
    `apart_or_self` has FAR on the diagonal too. `members`: (s, n); `outside`: 0 for members and FAR elsewhere; `member_sizes`: (s, n).
    """

    sizes: Numbers
    lower: Numbers
    upper: Numbers
    meets: Flags
    apart: Numbers
    apart_or_self: Numbers
    members: Flags
    outside: Numbers
    member_sizes: Numbers
    by_birth: npt.NDArray[np.intp]

    @classmethod
    def of(cls, buffers: Sequence[Buffer], alignment: int) -> "Board":
        """The tables of buffers of more than 0 bytes."""
        sizes = np.array([-(-buffer.size // alignment) for buffer in buffers], dtype=np.int64)
        # Ranks in place of times: a clock of events or microseconds is sparse, and only the order matters.
        moments = {
            moment: index for index, moment in enumerate(sorted({end for b in buffers for end in (b.lower, b.upper)}))
        }
        lower = np.array([moments[buffer.lower] for buffer in buffers], dtype=np.int64)
        upper = np.array([moments[buffer.upper] for buffer in buffers], dtype=np.int64)
        meets = (lower[:, None] < upper[None]) & (lower[None] < upper[:, None])
        members = _sections(lower, upper)
        # Added to heights before a minimum is taken, it masks what does not meet, without an array of conditions.
        apart = np.where(meets, 0, FAR)
        apart_or_self = apart.copy()
        np.fill_diagonal(apart_or_self, FAR)
        return cls(
            sizes=sizes,
            lower=lower,
            upper=upper,
            meets=meets,
            apart=apart,
            apart_or_self=apart_or_self,
            members=members,
            outside=np.where(members, 0, FAR),
            member_sizes=members * sizes,
            by_birth=np.argsort(lower, kind="stable"),
        )

    def parts(self, is_open: Flags) -> list[npt.NDArray[np.intp]]:
        """The open buffers in groups whose lifetimes do not overlap, the smallest group first; groups can be solved independently."""
        order = self.by_birth[is_open[self.by_birth]]
        last_deaths = np.maximum.accumulate(self.upper[order])
        cuts = np.flatnonzero(self.lower[order][1:] >= last_deaths[:-1]) + 1
        return sorted(np.split(order, cuts), key=len) if len(cuts) else [order]


def _sections(lower: Numbers, upper: Numbers) -> Flags:
    """The maximal sets of live buffers: those just after a lifetime begins, where the next change is an end."""
    allocations, deaths = set(lower.tolist()), set(upper.tolist())
    moments = sorted(allocations | deaths)
    starts = [
        moment for moment, following in itertools.pairwise(moments) if moment in allocations and following in deaths
    ]
    at = np.array(starts, dtype=np.int64)[:, None]
    return (lower <= at) & (at < upper)
