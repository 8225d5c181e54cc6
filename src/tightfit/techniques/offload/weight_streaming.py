"""Weight streaming: weights that are not trained live in host memory, and come to the card one block ahead of their use.

Rajbhandari et al., "ZeRO-Infinity" (arXiv:2104.07857), on one card and for frozen weights: the base of a low-rank fine-tune, or a model that only predicts.
They are never copied back, as nobody writes to them. A copy takes no time of its own where the block beside it computes longer.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, final

import numpy as np

from tightfit.analysis.profile import Profile
from tightfit.analysis.relative_places import relative_place
from tightfit.analysis.streamed_uses import StreamedUses, WeightBlock
from tightfit.cost.copies import copy_seconds
from tightfit.cost.steps import step_operators
from tightfit.planner.option import Change, Option, merged
from tightfit.tape import Column, CopyDirection, Phase
from tightfit.techniques.technique import AbstractTechnique, Choice

if TYPE_CHECKING:
    from tightfit.techniques.session import Session

_MIN_BLOCKS = 2
# Weights below these, together, are not worth a copy each.
_SMALLEST_SHARE = 0.02
_SMALLEST_BYTES = 1 << 20
# Parts of the slab begin at multiples of this.
_ALIGNMENT = 512


@final
class WeightStreaming(AbstractTechnique):
    """Trades host memory and traffic on the link for the frozen weights of a block."""

    name = "weight_streaming"
    exact = True
    exactness = "bit for bit: the same values are copied to the card"

    def options(self, profile: Profile) -> Iterable[Option]:
        """One option for each layer that has weights which are not trained."""
        if len(profile.tape.weights):
            yield from _options(self.name, profile)

    def apply(self, session: "Session", chosen: Sequence[Choice]) -> None:
        """Moves the weights of each block to the host, and wraps its forward and those of the blocks beside it."""
        from tightfit.techniques.offload.apply_weight_streaming import apply_weight_streaming

        apply_weight_streaming(session, chosen)


def _options(technique: str, profile: Profile) -> Iterator[Option]:
    uses = StreamedUses(profile)
    if len(uses.blocks) < _MIN_BLOCKS:
        return
    paths = [block.path for block in uses.blocks.values()]
    beside = {path: (before, after) for before, path, after in zip(["", *paths], paths, [*paths[1:], ""], strict=False)}
    sizes = profile.tape.storages.num_bytes
    first = _first_operator(profile, uses)
    for number, block in uses.blocks.items():
        smallest = _smallest(sizes[block.storages])
        streamed = block.storages[sizes[block.storages] >= smallest]
        if not len(streamed):
            continue
        num_bytes = profile.modules.bytes_of(streamed)
        host_bytes = int((-(-sizes[streamed] // _ALIGNMENT) * _ALIGNMENT).sum())
        preceding, following = (relative_place(block.path, path) if path else "" for path in beside[block.path])
        yield Option(
            technique=technique,
            where=block.path,
            equivalence_class=f"{technique}:{re.sub(r'[0-9]+', '*', block.path)}#{num_bytes}:{preceding}:{following}",
            settings={
                "preceding": preceding,
                "following": following,
                "smallest_bytes": smallest,
                "host_bytes": host_bytes,
                **({"without_gradients": True} if uses.is_prediction else {}),
            },
            changes=_changes(profile, uses, number, streamed, first),
            seconds=_not_hidden(profile, uses, number, num_bytes) / profile.num_steps,
            exact=True,
            slots=_slots(profile, block),
            host_bytes=host_bytes,
        )


def _first_operator(profile: Profile, uses: StreamedUses) -> int:
    """The operator before which the plan is put on the model."""
    if uses.is_prediction:
        return step_operators(profile.tape)[0][0]
    return int(np.flatnonzero(profile.tape.operators.phase == Phase.FORWARD)[0])


def _smallest(num_bytes: Column) -> int:
    """The size from which on weights are streamed: all but `_SMALLEST_SHARE` of the bytes are in those."""
    ordered = np.sort(num_bytes)
    if not len(ordered):
        return _SMALLEST_BYTES
    left = int(np.searchsorted(np.cumsum(ordered), _SMALLEST_SHARE * int(ordered.sum()), side="right"))
    return min(_SMALLEST_BYTES, int(ordered[min(left, len(ordered) - 1)]))


def _slots(profile: Profile, block: WeightBlock) -> frozenset[str]:
    inside = profile.modules.modules_inside(block.path)
    return frozenset(f"weights@{module}" for module in (block.path, *inside))


def _changes(profile: Profile, uses: StreamedUses, number: int, streamed: Column, first: int) -> tuple[Change, ...]:
    """The weights leave when the plan is put on the model, before the operator `first`, and are back during their uses. Those that the program moves to the
    card are left at the host."""
    tape, event_of = profile.tape, profile.modules.event_of
    moved = tape.copies.operator[tape.copies.direction == CopyDirection.TO_CARD]
    is_left = np.isin(tape.storages.operator[streamed], moved)
    begins = np.where(is_left, profile.allocated_at[streamed], event_of(first))
    away = (
        Change(begin=begin, end=len(tape.events), num_bytes=-num_bytes)
        for begin, num_bytes in zip(begins.tolist(), profile.modules.block_bytes[streamed].tolist(), strict=True)
    )
    num_bytes = profile.modules.bytes_of(streamed)
    back = (
        Change(begin=int(event_of(begin)), end=int(event_of(end)), num_bytes=num_bytes)
        for begin, end in uses.on_card(number)
    )
    return merged((*away, *back))


def _not_hidden(profile: Profile, uses: StreamedUses, number: int, num_bytes: int) -> float:
    """Seconds of the copies to the card that the block before does not hide."""
    copy, found = copy_seconds(num_bytes, profile.device, to_card=True), 0.0
    for before, use in itertools.pairwise((None, *uses.uses)):
        assert use is not None
        if use.block == number:
            beside = 0.0
            if use.is_ahead and before is not None:
                beside = float(profile.seconds[before.begin : use.begin].sum())
            found += max(0.0, copy - beside)
    return found
