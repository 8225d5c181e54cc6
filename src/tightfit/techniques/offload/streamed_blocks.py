"""What the streaming techniques share: which weights of a block are worth a copy (activation offload asks that of what is saved), and which of the copies are not hidden."""

import itertools

import numpy as np

from tightfit.analysis.profile import Profile
from tightfit.analysis.streamed_uses import StreamedUses, WeightBlock
from tightfit.cost.copies import copy_seconds
from tightfit.cost.disks import disk_seconds
from tightfit.cost.host_python import HostWork
from tightfit.planner.sides import Sides
from tightfit.tape import Column

MIN_BLOCKS = 2
# Storages below these, together, are not worth a copy each.
_SMALLEST_SHARE = 0.02
_SMALLEST_BYTES = 1 << 20
# Parts of the slab begin at multiples of this.
ALIGNMENT = 512


def smallest_of(num_bytes: Column) -> int:
    """The size from which on storages are moved: all but `_SMALLEST_SHARE` of the bytes are in those."""
    ordered = np.sort(num_bytes)
    if not len(ordered):
        return _SMALLEST_BYTES
    left = int(np.searchsorted(np.cumsum(ordered), _SMALLEST_SHARE * int(ordered.sum()), side="right"))
    return min(_SMALLEST_BYTES, int(ordered[min(left, len(ordered) - 1)]))


def slots_of(profile: Profile, block: WeightBlock) -> frozenset[str]:
    """The slots of a block: no two options stream its weights, and none runs what is around it in parts, for which it would bring them."""
    inside = profile.modules.modules_inside(block.path)
    return frozenset(f"weights@{module}" for module in (block.path, *inside)) | {f"brings@{block.path}"}


def not_hidden(
    profile: Profile, uses: StreamedUses, number: int, streamed: Column, *, from_disk: bool = False
) -> Sides:
    """Seconds in a step of the copies to the card, or of reading them `from_disk`, that the block before does not hide, and of the Python that brings them."""
    num_bytes = profile.lifetimes.bytes_of(streamed)
    copy, found = copy_seconds(num_bytes, profile.device, to_card=True), 0.0
    if from_disk:
        # Piece by piece, so the slower of both counts.
        copy = max(copy, disk_seconds(num_bytes, to_disk=False))
    for before, use in itertools.pairwise((None, *uses.uses)):
        assert use is not None
        if use.block == number:
            beside = 0.0
            if use.is_ahead and before is not None:
                beside = float(profile.costs.seconds[before.begin : use.begin].sum())
            found += max(0.0, copy - beside)
    num_uses = sum(use.block == number for use in uses.uses)
    of_use = HostWork.STREAMED_CALL.value + HostWork.STREAMED_PARAMETER.value * len(streamed)
    return Sides(on_card=found, on_host=num_uses * of_use) * (1 / profile.num_steps)
