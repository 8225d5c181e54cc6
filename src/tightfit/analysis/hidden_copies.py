"""What could move to the host and back beside the block that follows: which block that is, how many bytes hide there, and what a longer copy adds.

A copy out runs beside the forward pass of the following block, and the copy back beside its backward pass.
"""

import dataclasses
import re
from typing import TYPE_CHECKING

import numpy as np

from tightfit.analysis.modules import ModuleCall, ModuleCalls
from tightfit.analysis.recomputable import RecomputableBlock
from tightfit.analysis.relative_places import is_of_same_model
from tightfit.cost.copies import copy_costs
from tightfit.cost.disks import disk_costs
from tightfit.tape import Column

if TYPE_CHECKING:
    from tightfit.analysis.profile import Profile

# Operators with results beside their first, which take no gradient.
_WITH_STATISTICS = re.compile(r"dropout|norm|attention|pool|topk|sort|median|mode|(?:max|min)\.dim")


def following_block(profile: "Profile", block: RecomputableBlock) -> RecomputableBlock | None:
    """The block of the same model whose calls come next after those of `block` and contain none of them; the outermost one."""
    found, begins = None, None
    for other in profile.blocks:
        # Each model has a session of its own, which finds no block of another one.
        if not is_of_same_model(block.path, other.path):
            continue
        if len(other.calls) != len(block.calls) or other.slots & block.slots:
            continue
        pairs = list(zip(block.calls, other.calls, strict=True))
        if not all(one.end <= after.begin and after.back_begin < one.back_begin for one, after in pairs):
            continue
        # Blocks are in order, the outermost first.
        if begins is None or other.calls[0].begin < begins:
            found, begins = other, other.calls[0].begin
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimeForCopies:
    """What one call of the following block has for copies, in seconds, and what they cost: seconds each and bytes per second, to the host and back."""

    forward_seconds: float
    backward_seconds: float
    out_costs: tuple[float, float]
    back_costs: tuple[float, float]

    def exposed_seconds(self, num_bytes: int, num_copies: int) -> float:
        """The seconds of copies of `num_bytes` in all, out and back, that the call does not hide."""
        found = 0.0
        for seconds, (latency, rate) in self._ways():
            found += max(0.0, num_copies * latency + num_bytes / rate - seconds)
        return found

    def hides(self, num_bytes: int, num_copies: int) -> bool:
        """Whether it hides copies of `num_bytes` in all, both ways."""
        return self.exposed_seconds(num_bytes, num_copies) == 0.0

    def _ways(self) -> tuple[tuple[float, tuple[float, float]], ...]:
        return (self.forward_seconds, self.out_costs), (self.backward_seconds, self.back_costs)


def copy_time(profile: "Profile", following: ModuleCall, *, to_disk: bool = False) -> TimeForCopies:
    """The time for copies beside this call of a block, to the host, or through it to disk."""
    seconds = profile.costs.seconds
    out_costs, back_costs = (copy_costs(profile.device, to_card=way) for way in (False, True))
    if to_disk:
        # Link and disk work on different pieces at the same time.
        out_costs = _slower(out_costs, disk_costs(to_disk=True))
        back_costs = _slower(back_costs, disk_costs(to_disk=False))
    return TimeForCopies(
        forward_seconds=float(seconds[following.begin : following.end].sum()),
        backward_seconds=float(seconds[following.back_begin : following.back_end].sum()),
        out_costs=out_costs,
        back_costs=back_costs,
    )


def _slower(link: tuple[float, float], disk: tuple[float, float]) -> tuple[float, float]:
    return max(link[0], disk[0]), min(link[1], disk[1])


def own_input(profile: "Profile", call: ModuleCall, following: ModuleCall) -> int:
    """The storage of the call's input, where another block has made it, and nothing but the call needs it once `following` begins; else -1.

    What comes into the first of a row of blocks is often kept by a name of their caller.
    """
    if call.input < 0:
        return -1
    freed_at = int(profile.lifetimes.freed_at[call.input])
    # What the call does not save is freed before the backward pass, unless the program has a name for it.
    is_kept = following.begin_event < freed_at <= call.back_event
    if is_kept or freed_at > call.back_end_event:
        return -1
    maker = int(profile.tape.storages.operator[call.input])
    begins, ends = profile.calls_of_blocks
    is_of_block = ((begins <= maker) & (maker < ends) & (ends <= call.begin)).any()
    return call.input if is_of_block else -1


def movable(profile: "Profile", call: ModuleCall, following: ModuleCall) -> Column:
    """The storages of a call that can leave the card until its backward pass: what it alone saves, with its input where it saves that."""
    modules = profile.modules
    saved = call.saved[_have_gradients(modules, call.saved)]
    found = own_input(profile, call, following)
    if found >= 0:
        saved = np.append(saved, found)
    # What is freed before the backward pass of the call is not saved by it, and what lives on after it is the program's own.
    freed_at = modules.lifetimes.freed_at[saved]
    return saved[(freed_at > call.back_event) & (freed_at <= call.back_end_event)]


def _have_gradients(modules: ModuleCalls, saved: Column) -> Column:
    """Which of these are results that take gradients: masks, indices and statistics, which come after them, are left on the card."""
    tape = modules.tape
    makers = tape.storages.operator[saved]
    found = np.ones(len(saved), dtype=bool)
    for at, (storage, maker) in enumerate(zip(saved.tolist(), makers.tolist(), strict=True)):
        if _WITH_STATISTICS.search(tape.strings[int(tape.operators.name[maker])]):
            found[at] = storage == modules.lifetimes.first_result(maker)
    return found
