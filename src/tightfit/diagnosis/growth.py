"""Memory growth (leaks): allocation sites with more bytes at the end of every step than at the end of the one before.

The first step is left out, because optimizers allocate their state in it. Gradients are left out too: a recording may end before they are freed.
"""

import dataclasses

import numpy as np

from tightfit.diagnosis.timeline import StepSpan
from tightfit.recordings.frames import AllocationSite
from tightfit.simulate.history import CATEGORIES, History
from tightfit.tape import Category

# The first step is left out, and two ends are needed to see a difference.
MIN_STEPS = 3
MIN_BYTES = 1024
NUM_GROWING = 8


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


def growth_of(history: History, places: tuple[AllocationSite, ...], steps: tuple[StepSpan, ...]) -> tuple[Growth, ...]:
    """The sites that grow, fastest first; empty with fewer than `MIN_STEPS` steps."""
    if len(steps) < MIN_STEPS:
        return ()
    blocks = history.blocks
    ends = [step.end - 1 for step in steps[1:]]
    lasting = np.flatnonzero((blocks.freed_at > ends[0]) & (blocks.category != Category.GRADIENTS))
    # By allocation site: a list that grows gets a new block in each step, all from one line.
    held: dict[tuple[AllocationSite, int], list[int]] = {}
    for block in lasting.tolist():
        held.setdefault((places[int(blocks.stack[block])], int(blocks.category[block])), []).append(block)
    found = []
    for (place, category), members in held.items():
        allocated_at, freed_at, num_bytes = (
            blocks.allocated_at[members],
            blocks.freed_at[members],
            blocks.num_bytes[members],
        )
        bytes_at_ends = [int(num_bytes[(allocated_at <= end) & (freed_at > end)].sum()) for end in ends]
        growth = (bytes_at_ends[-1] - bytes_at_ends[0]) // (len(bytes_at_ends) - 1)
        # Monotonic in every step: a cache that is filled and dropped in turn is no leak.
        if growth >= MIN_BYTES and bytes_at_ends == sorted(bytes_at_ends):
            found.append(
                Growth(
                    where=place.name,
                    function=place.function,
                    callers=place.callers,
                    operator=place.operator,
                    category=CATEGORIES[category],
                    bytes_per_step=growth,
                    num_blocks=int(((allocated_at <= ends[-1]) & (freed_at > ends[-1])).sum()),
                    num_bytes=bytes_at_ends[-1],
                )
            )
    return tuple(sorted(found, key=lambda one: -one.bytes_per_step)[:NUM_GROWING])
