"""Activation offload: what a block saves for backward waits in host memory, and comes back before its backward pass.

Rhu et al., "vDNN" (arXiv:1602.08124), per block of the module tree and by storage: a storage that is saved several times, or as views, moves once, and
parameters not at all. The copies run beside the blocks that follow and precede, so they cost time only where the link is slower than a block.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, final

import numpy as np

from tightfit.analysis.modules import ModuleCall, ModuleCalls
from tightfit.analysis.profile import Profile
from tightfit.analysis.recomputable import RecomputableBlock
from tightfit.cost.copies import copy_seconds
from tightfit.planner.option import Change, Option
from tightfit.tape import Column
from tightfit.techniques.offload.relative_places import relative_place
from tightfit.techniques.technique import AbstractTechnique, Choice

if TYPE_CHECKING:
    from tightfit.techniques.session import Session

# Storages below these, together, are not worth a copy each.
_SMALLEST_SHARE = 0.02
_SMALLEST_BYTES = 1 << 20
# Parts of the slab begin at multiples of this.
_ALIGNMENT = 512


@final
class ActivationOffload(AbstractTechnique):
    """Trades host memory and traffic on the link for everything that a block saves for backward."""

    name = "activation_offload"
    exact = True
    exactness = "bit for bit: the same values are copied to the host and back"

    def options(self, profile: Profile) -> Iterable[Option]:
        """One option for each block that another one follows; it shares slots with the modules inside and around it."""
        for block in profile.blocks:
            following = _following(profile, block)
            if following is not None:
                found = _option(self.name, profile, block, following)
                if found is not None:
                    yield found

    def apply(self, session: "Session", chosen: Sequence[Choice]) -> None:
        """Wraps the forward of each block, and of each that follows one."""
        from tightfit.techniques.offload.apply_activation_offload import apply_activation_offload

        apply_activation_offload(session, chosen)


def _following(profile: Profile, block: RecomputableBlock) -> RecomputableBlock | None:
    """The block whose calls come next after those of `block` and contain none of them; the outermost one."""
    found, begins = None, None
    for other in profile.blocks:
        if len(other.calls) != len(block.calls) or other.slots & block.slots:
            continue
        pairs = list(zip(block.calls, other.calls, strict=True))
        if not all(one.end <= after.begin and after.back_begin < one.back_begin for one, after in pairs):
            continue
        # Blocks are in order, the outermost first.
        if begins is None or other.calls[0].begin < begins:
            found, begins = other, other.calls[0].begin
    return found


def _option(technique: str, profile: Profile, block: RecomputableBlock, following: RecomputableBlock) -> Option | None:
    modules, tape = profile.modules, profile.tape
    smallest = _smallest(tape.storages.num_bytes[block.calls[-1].saved])
    changes: list[Change] = []
    seconds, host_bytes = 0.0, 0
    for call, after in zip(block.calls, following.calls, strict=True):
        moved = _moved(modules, call, smallest)
        num_bytes = modules.bytes_of(moved)
        # Its memory is free once the block that follows is over, and taken again when the backward pass comes to that one.
        changes.append(Change(begin=after.end_event, end=after.back_event, num_bytes=-num_bytes))
        seconds += _not_hidden(profile, num_bytes, after)
        host_bytes += int((-(-tape.storages.num_bytes[moved] // _ALIGNMENT) * _ALIGNMENT).sum())
    if not any(change.num_bytes for change in changes):
        return None
    # Of several rounds of a step each gives its host memory back before the next.
    calls_at_once = -(-len(block.calls) // max(1, modules.num_rounds))
    return Option(
        technique=technique,
        where=block.path,
        equivalence_class=f"{technique}:{block.equivalence_class}:{following.equivalence_class}",
        settings={
            "following": relative_place(block.path, following.path),
            "smallest_bytes": smallest,
            "host_bytes": -(-host_bytes * calls_at_once // len(block.calls)),
        },
        changes=tuple(changes),
        seconds=seconds / profile.num_steps,
        exact=True,
        slots=block.slots,
        host_bytes=-(-host_bytes * calls_at_once // len(block.calls)),
    )


def _smallest(num_bytes: Column) -> int:
    """The size from which on storages move: all but `_SMALLEST_SHARE` of the bytes are in those."""
    ordered = np.sort(num_bytes)
    if not len(ordered):
        return _SMALLEST_BYTES
    left = int(np.searchsorted(np.cumsum(ordered), _SMALLEST_SHARE * int(ordered.sum()), side="right"))
    return min(_SMALLEST_BYTES, int(ordered[min(left, len(ordered) - 1)]))


def _moved(modules: ModuleCalls, call: ModuleCall, smallest: int) -> Column:
    """The storages that move: what the call saves, and its input, where nothing else has them when the next block is over."""
    moved = call.saved[modules.tape.storages.num_bytes[call.saved] >= smallest]
    # What lives on after the backward pass of the call is the program's own.
    return moved[modules.freed_at[moved] <= call.back_end_event]


def _not_hidden(profile: Profile, num_bytes: int, after: ModuleCall) -> float:
    """Seconds of the copies to the host and back that the block beside them does not hide."""
    out = copy_seconds(num_bytes, profile.device, to_card=False)
    back = copy_seconds(num_bytes, profile.device, to_card=True)
    forward = float(profile.seconds[after.begin : after.end].sum())
    backward = float(profile.seconds[after.back_begin : after.back_end].sum())
    return max(0.0, out - forward) + max(0.0, back - backward)
