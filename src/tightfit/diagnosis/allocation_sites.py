"""Allocation sites at a time step of a history: blocks of one category are grouped by the stack (and kind of module) that allocated them."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tightfit.recordings.frames import AllocationSite
from tightfit.simulate.history import CATEGORIES, History
from tightfit.tape import Column


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SiteUsage:
    """One allocation site; numbers in the path of its module are `*`. `where` is the user's line, or the next best description."""

    category: str
    where: str
    function: str
    callers: tuple[str, ...]
    operator: str
    module: str
    num_blocks: int
    num_bytes: int


def largest_sites(history: History, places: Sequence[AllocationSite], chosen: Column) -> tuple[SiteUsage, ...]:
    """The allocation sites of the `chosen` blocks (booleans, one for each block), the largest first."""
    # The layers of a model share their lines; listed one by one they would fill the table with equal rows.
    modules = [".".join("*" if p.isdigit() else p for p in module.split(".")) for module in history.modules]
    blocks = history.blocks
    groups: dict[tuple[int, AllocationSite, str], list[int]] = {}
    at = np.flatnonzero(chosen)
    columns = (blocks.category[at], blocks.stack[at], blocks.module[at], blocks.block_bytes[at])
    for category, stack, module, num_bytes in zip(*(column.tolist() for column in columns), strict=True):
        # By Place and not by stack: stacks that differ only inside of libraries are one site.
        group = groups.setdefault((category, places[stack], modules[module]), [0, 0])
        group[0] += 1
        group[1] += num_bytes
    return tuple(
        SiteUsage(
            category=CATEGORIES[category],
            where=place.name,
            function=place.function,
            callers=place.callers,
            operator=place.operator,
            module=module,
            num_blocks=num_blocks,
            num_bytes=num_bytes,
        )
        for (category, place, module), (num_blocks, num_bytes) in sorted(groups.items(), key=lambda item: -item[1][1])
    )


def bytes_by_category(history: History, chosen: Column) -> dict[str, int]:
    """The bytes of the `chosen` blocks by category, the largest first; categories without a byte are left out."""
    blocks = history.blocks
    found = {
        name: int(blocks.block_bytes[chosen & (blocks.category == at)].sum()) for at, name in enumerate(CATEGORIES)
    }
    return dict(sorted(((name, count) for name, count in found.items() if count), key=lambda item: -item[1]))
