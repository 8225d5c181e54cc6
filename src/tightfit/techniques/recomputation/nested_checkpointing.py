"""Nested checkpointing: of a sequence of blocks, only the first one's input is saved; the inputs of the others are recomputed from it.

Checkpointing every block saves an input per block, which in a very deep stack dominates. Chen et al., "Training deep nets with sublinear memory
cost" (arXiv:1604.06174), section 4.3: recursive recomputation. Here a segment costs one more forward pass of its blocks except the last.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, final

from tightfit.analysis.modules import ModuleCalls
from tightfit.analysis.profile import Profile
from tightfit.analysis.recomputable import RecomputableBlock, freed_between, seconds_in_python
from tightfit.analysis.sequences import saved_bytes
from tightfit.planner.option import Change, Option
from tightfit.planner.sides import Sides
from tightfit.techniques.technique import AbstractTechnique, ChosenOption, Needs

if TYPE_CHECKING:
    from tightfit.techniques.session import Session

_LENGTHS = (2, 4, 8, 16)
_FEWEST_BLOCKS = 6
# Of all that waits for the backward pass: what the inputs of a stack's blocks must come to.
_SMALLEST_SHARE = 0.02
# Each run of a block is half of what a call of it costs the processor.
_OF_A_RUN = 0.5


@final
class NestedCheckpointing(AbstractTechnique):
    """Trades about two more forward passes of some blocks for all that they save for backward, including all inputs except the first."""

    name = "nested_checkpointing"
    exact = True
    needs = Needs.REPEATABLE
    exactness = "bit for bit, random state and autocast included; up to the order of a reduction where a decoder would fill a key-value cache"

    def options(self, profile: Profile) -> Iterable[Option]:
        """Segments of several lengths, of each stack of equal consecutive blocks."""
        module_calls = profile.modules
        least = _SMALLEST_SHARE * saved_bytes(module_calls)
        for stack in _stacks(profile):
            inputs = sum(_outputs_bytes(module_calls, block) for block in stack)
            if len(stack) < _FEWEST_BLOCKS or inputs < least:
                continue
            for length in _LENGTHS:
                for begin in range(0, len(stack) - length + 1, length):
                    yield _option(self.name, profile, stack[begin : begin + length])

    def apply(self, session: "Session", chosen: Sequence[ChosenOption]) -> None:
        """Wraps the forward of each block of each segment."""
        from tightfit.techniques.recomputation.apply_nested_checkpointing import apply_nested_checkpointing

        apply_nested_checkpointing(session, chosen)


def _stacks(profile: Profile) -> Iterator[list[RecomputableBlock]]:
    """Blocks with consecutive numbers in one list, with the same operators and the same number of calls."""
    # Blocks with batch norm are left out: each run moves the running statistics, and a third run would move
    # them a third time.
    by_list: dict[tuple[str, str, int], dict[int, RecomputableBlock]] = {}
    for block in profile.blocks:
        parent, _, last = block.path.rpartition(".")
        call = block.calls[-1]
        names = profile.modules.operator_names(call.begin, call.end)
        if last.isdigit() and "." in parent and not any("batch_norm" in name for name in names):
            by_list.setdefault((parent, block.equivalence_class, len(block.calls)), {})[int(last)] = block
    for found in by_list.values():
        stack: list[RecomputableBlock] = []
        for number in sorted(found):
            if stack and not (number - 1 in found and _follows(stack[-1], found[number])):
                yield stack
                stack = []
            stack.append(found[number])
        yield stack


def _follows(before: RecomputableBlock, block: RecomputableBlock) -> bool:
    """Whether each call of `block` comes after that of the one `before`, whose output may be its input: a program may go through a list from its end."""
    return all(one.end <= other.begin for one, other in zip(before.calls, block.calls, strict=True))


def _outputs_bytes(module_calls: ModuleCalls, block: RecomputableBlock) -> int:
    output = block.calls[-1].output
    return (
        int(module_calls.lifetimes.block_bytes[output])
        if output >= 0 and module_calls.saved_for_backward[output]
        else 0
    )


def _option(technique: str, profile: Profile, segment: Sequence[RecomputableBlock]) -> Option:
    module_calls, seconds = profile.modules, profile.costs.seconds
    changes, added, num_issued = [], 0.0, 0
    in_python = sum(map(seconds_in_python, segment)) + _OF_A_RUN * sum(map(seconds_in_python, segment[:-1]))
    for calls in zip(*(block.calls for block in segment), strict=True):
        again = [float(seconds[call.begin : call.end].sum()) for call in calls]
        added += sum(again) + sum(again[:-1])
        issued = [int(profile.costs.is_kernel[call.begin : call.end].sum()) for call in calls]
        num_issued += sum(issued) + sum(issued[:-1])
        for call in calls:
            changes += freed_between(module_calls.lifetimes, call.saved, call.end_event, call.back_event)
        back = calls[-1].back_event
        for call, following in itertools.pairwise(calls):
            output = call.output
            if output >= 0 and module_calls.saved_for_backward[output] and following.end_event < back:
                size = int(module_calls.lifetimes.block_bytes[output])
                changes.append(Change(begin=following.end_event, end=back, num_bytes=-size))
    parent, _, first = segment[0].path.rpartition(".")
    sides = Sides(
        on_card=added / profile.num_steps,
        on_host=(num_issued * profile.costs.efficiency.issue_seconds + in_python) / profile.num_steps,
    )
    return Option(
        technique=technique,
        where=parent,
        equivalence_class=f"{technique}:{segment[0].equivalence_class}:{len(segment)}",
        settings={"begin": int(first), "end": int(first) + len(segment)},
        changes=tuple(changes),
        seconds=profile.step.added(sides),
        sides=sides,
        in_backward=sides,
        exact=True,
        slots=frozenset[str]().union(*(block.slots for block in segment)),
    )
