"""Memory growth (leaks): allocation sites with more bytes at the end of every step than at the end of the one before.

The first step is left out, because optimizers allocate their state in it. Of gradients only those count that are older than the step at whose end they
are held: a recording may end before the last ones are freed.
"""

import dataclasses
import itertools

import numpy as np

from tightfit.diagnosis.step_spans import StepSpan
from tightfit.recordings.frames import AllocationSite
from tightfit.simulate.history import CATEGORIES, UNKNOWN, Blocks, History
from tightfit.tape import Category, Column

# The first step is left out, and two ends are needed to see a difference.
MIN_STEPS = 3
MIN_BYTES = 1024
NUM_GROWING = 8
_PASSING = (Category.ACTIVATIONS, Category.TEMPORARIES, Category.INPUTS)
# With fewer differences of ends a single rise may be one of many.
_MIN_ENDS_OF_A_JUMP = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """An allocation site that grows: bytes per step, and blocks and requested bytes at the end of the last step."""

    where: str
    function: str
    callers: tuple[str, ...]
    operator: str
    category: str
    bytes_per_step: int
    num_blocks: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GrowingSite:
    """An allocation site, with its blocks that outlive the second step, the category of most of them, their bytes at the end of each later step, and how many blocks those of the last are."""

    place: AllocationSite
    category: int
    blocks: Column
    bytes_at_ends: tuple[int, ...]
    num_blocks: int

    @property
    def bytes_per_step(self) -> int:
        """How much the site grows."""
        return (self.bytes_at_ends[-1] - self.bytes_at_ends[0]) // (len(self.bytes_at_ends) - 1)

    def is_piled_up(self, blocks: Blocks, steps: tuple[StepSpan, ...]) -> bool:
        """Whether more blocks of earlier steps are there with each step: what one block of each step takes grows with the sizes of the program, too."""
        own = self.blocks

        def from_before(step: StepSpan) -> int:
            is_held = (blocks.allocated_at[own] < step.begin) & (blocks.freed_at[own] >= step.end)
            return int(blocks.num_bytes[own][is_held].sum())

        return from_before(steps[-1]) > from_before(steps[1])


def growing_sites(
    history: History, places: tuple[AllocationSite, ...], steps: tuple[StepSpan, ...]
) -> tuple[GrowingSite, ...]:
    """The sites that grow, fastest first; empty with fewer than `MIN_STEPS` steps."""
    if len(steps) < MIN_STEPS:
        return ()
    blocks = history.blocks
    ends = [step.end - 1 for step in steps[1:]]
    lasting = np.flatnonzero(blocks.freed_at > ends[0])
    # By allocation site: a list that grows gets a new block in each step, all from one line.
    held: dict[tuple[AllocationSite, int], list[int]] = {}
    for block in lasting.tolist():
        # Whether a block is an activation or a temporary shows when it is freed, which the last step's are not.
        category = int(blocks.category[block])
        kind = UNKNOWN if category in _PASSING else category
        held.setdefault((places[int(blocks.stack[block])], kind), []).append(block)
    found = []
    for (place, category), members in held.items():
        allocated_at, freed_at = blocks.allocated_at[members], blocks.freed_at[members]
        num_bytes = blocks.num_bytes[members]
        until = [step.begin - 1 for step in steps[1:]] if category == Category.GRADIENTS else ends
        at_ends = [(allocated_at <= last) & (freed_at > end) for last, end in zip(until, ends, strict=True)]
        site = GrowingSite(
            place=place,
            category=int(np.bincount(blocks.category[members], weights=num_bytes).argmax()),
            blocks=np.array(members),
            bytes_at_ends=tuple(int(num_bytes[held_then].sum()) for held_then in at_ends),
            num_blocks=int(at_ends[-1].sum()),
        )
        # Monotonic in every step: a cache that is filled and dropped in turn is no leak. Nor is what was made late, once.
        rises = [later - earlier for earlier, later in itertools.pairwise(site.bytes_at_ends)]
        is_steady = min(rises) >= 0 and (len(rises) < _MIN_ENDS_OF_A_JUMP or sum(rise > 0 for rise in rises) > 1)
        if site.bytes_per_step >= MIN_BYTES and is_steady:
            found.append(site)
    return tuple(sorted(found, key=lambda site: -site.bytes_per_step))


def growth_of(history: History, places: tuple[AllocationSite, ...], steps: tuple[StepSpan, ...]) -> tuple[Growth, ...]:
    """The sites that grow, fastest first and `NUM_GROWING` at most; empty with fewer than `MIN_STEPS` steps."""
    return tuple(
        Growth(
            where=site.place.name,
            function=site.place.function,
            callers=site.place.callers,
            operator=site.place.operator,
            category=CATEGORIES[site.category],
            bytes_per_step=site.bytes_per_step,
            num_blocks=site.num_blocks,
            num_bytes=site.bytes_at_ends[-1],
        )
        for site in growing_sites(history, places, steps)[:NUM_GROWING]
    )
