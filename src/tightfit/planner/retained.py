"""What other options save and cost once a step runs its backward pass twice, the first time with the graph retained.

In the first of the two passes nothing that was saved for the backward pass is freed before its end, unless another option has dropped it. So what an
option drops stays dropped to the end of the pass, and what it computes again in a backward pass it computes twice.
"""

import bisect
import dataclasses
from collections.abc import Sequence

from tightfit.planner.option import Change, Option, RetainedPass
from tightfit.planner.sides import Sides


def with_retained(option: Option, passes: Sequence[RetainedPass], step: Sides) -> Option:
    """`option` beside one that retains the graph in `passes`, in a step of these sides."""
    longer = [
        Change(begin=begin, end=each.end, num_bytes=change.num_bytes)
        for each in passes
        for change in option.changes
        if change.num_bytes < 0 and change.begin < each.begin < change.end < each.end
        if (begin := _dropped_again(each, change)) < each.end
    ]
    if not longer and option.in_backward == Sides():
        return option
    sides = option.added_sides + option.in_backward
    return dataclasses.replace(option, changes=(*option.changes, *longer), seconds=step.added(sides), sides=sides)


def _dropped_again(each: RetainedPass, change: Change) -> int:
    """The event at which what `change` drops until its backward pass would have been freed: there, by how much is freed after that pass begins."""
    at = bisect.bisect_left(each.freed_at, change.end)
    before = each.freed_bytes[at - 1] if at else 0
    done = bisect.bisect_left(each.freed_bytes, before - change.num_bytes)
    return each.freed_at[done] if done < len(each.freed_at) else each.end
