"""Allocation sites: blocks grouped by category, stack and kind of module, and the largest single blocks at the peak."""

import dataclasses
import re

import numpy as np

from tightfit.recordings.frames import place_of
from tightfit.simulate.history import History, is_library_frame, user_frame
from tightfit.tape import Column

_FRAME = re.compile(r"(.*:\d+) (.*)", flags=re.DOTALL)
# Only whole components: `layers.3` is of kind `layers.*`, `conv2d` stays.
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SiteBlocks:
    """Blocks of one category that one stack allocated in modules of one kind (`h.*.mlp`); the first three figures are of the peak.

    `stack` is an index of the history's stacks, -1 for none; `total_bytes` counts every block of the run, freed or not.
    """

    category: int
    module: str
    stack: int
    peak_bytes: int
    num_at_peak: int
    largest_bytes: int
    total_bytes: int
    num_in_total: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SingleBlock:
    """One block that is allocated at the peak; `freed_at` is the number of events where it is never freed."""

    category: int
    module: str
    stack: int
    block_bytes: int
    requested_bytes: int
    allocated_at: int
    freed_at: int


def places(history: History, most: int) -> tuple[SiteBlocks, ...]:
    """The sites with most bytes at the peak, then those with most bytes over the run, at most `most` of both together."""
    blocks = history.blocks
    if not len(blocks):
        return ()
    kinds, kind_of_module = _kinds(history.modules)
    kind = kind_of_module[blocks.module]
    num_stacks, num_kinds = len(history.stacks) + 1, len(kinds)
    # Three indices in one integer, so that numpy groups millions of blocks without a Python loop.
    key = (blocks.category * num_stacks + blocks.stack + 1) * num_kinds + kind
    keys, group = np.unique(key, return_inverse=True)
    alive = history.alive_at(history.peak_event)

    def per_group(which: Column, weights: Column | None = None) -> Column:
        taken = None if weights is None else weights[which]
        return np.bincount(group[which], taken, len(keys)).astype(np.int64)

    all_blocks = np.ones(len(blocks), dtype=bool)
    peak_bytes, total_bytes = per_group(alive, blocks.block_bytes), per_group(all_blocks, blocks.block_bytes)
    num_at_peak, num_in_total = per_group(alive), per_group(all_blocks)
    largest = np.zeros(len(keys), dtype=np.int64)
    np.maximum.at(largest, group, blocks.block_bytes)
    # Stable, so that sites with equal bytes keep their order from run to run.
    chosen = np.argsort(-peak_bytes, kind="stable")[: most // 2]
    # At most half of the rows are of the peak, so that sites of many short-lived temporaries show too.
    chosen = np.concatenate([chosen[peak_bytes[chosen] > 0], np.argsort(-total_bytes, kind="stable")[:most]])
    first = np.sort(np.unique(chosen, return_index=True)[1])[:most]
    return tuple(
        SiteBlocks(
            category=int(keys[i]) // (num_stacks * num_kinds),
            module=kinds[int(keys[i]) % num_kinds],
            stack=int(keys[i]) // num_kinds % num_stacks - 1,
            peak_bytes=int(peak_bytes[i]),
            num_at_peak=int(num_at_peak[i]),
            largest_bytes=int(largest[i]),
            total_bytes=int(total_bytes[i]),
            num_in_total=int(num_in_total[i]),
        )
        for i in chosen[first]
    )


def largest_blocks(history: History, most: int) -> tuple[SingleBlock, ...]:
    """The largest blocks that are allocated at the peak."""
    blocks = history.blocks
    alive = np.flatnonzero(history.alive_at(history.peak_event))
    chosen = alive[np.argsort(-blocks.block_bytes[alive], kind="stable")[:most]]
    return tuple(
        SingleBlock(
            category=int(blocks.category[i]),
            module=module_name(history, i),
            stack=int(blocks.stack[i]),
            block_bytes=int(blocks.block_bytes[i]),
            requested_bytes=int(blocks.num_bytes[i]),
            allocated_at=int(blocks.allocated_at[i]),
            freed_at=int(blocks.freed_at[i]),
        )
        for i in chosen.tolist()
    )


def module_name(history: History, block: int) -> str:
    """The module that allocated `block`; empty where none is known."""
    module = int(history.blocks.module[block])
    return history.modules[module] if module >= 0 else ""


def stack_of(history: History, stack: int) -> tuple[str, ...]:
    """The frames of a stack by its index, none for -1."""
    return history.stacks[stack] if stack >= 0 else ()


def line_and_function(stack: tuple[str, ...]) -> tuple[str, str]:
    """The user's own line in `stack`, as `file.py:41`, or the next best description; and the operator, or else the function there."""
    place = place_of(stack)
    line, function = split_frame(user_frame(stack))
    operator = place.operator.removeprefix("aten.")
    # What no line asked for is named by its operator.
    is_operator = bool(operator) and (place.name or line) == place.operator
    return (operator, "") if is_operator else (place.name or line, operator or place.function or function)


def split_frame(frame: str) -> tuple[str, str]:
    """`file.py:41 function` as its two parts."""
    match = _FRAME.fullmatch(frame)
    return (match[1], match[2]) if match else (frame, "")


def user_path(stack: tuple[str, ...]) -> tuple[str, ...]:
    """The frames of the user's own code, outermost first."""
    return tuple(frame for frame in reversed(stack) if not is_library_frame(frame))


def _kinds(modules: tuple[str, ...]) -> tuple[list[str], Column]:
    """The kinds of modules (`h.3.mlp` is of kind `h.*.mlp`), and the kind of each module; the last entry is for index -1."""
    kinds: dict[str, int] = {}
    of_module = [kinds.setdefault(_NUMBER.sub("*", module), len(kinds)) for module in (*modules, "")]
    return list(kinds), np.array(of_module, dtype=np.int64)
