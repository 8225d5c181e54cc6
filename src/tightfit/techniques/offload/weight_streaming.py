"""Weight streaming: weights that are not trained live in host memory or on disk, and come to the card one block ahead of their use.

Rajbhandari et al., "ZeRO-Infinity" (arXiv:2104.07857), on one card and for frozen weights: the base of a low-rank fine-tune, or a model that only predicts.
They are never copied back, as nobody writes to them. A copy takes no time of its own where the block beside it computes longer.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from tightfit.analysis.profile import Profile
from tightfit.analysis.relative_places import is_of_same_model, relative_place
from tightfit.analysis.streamed_uses import StreamedUses
from tightfit.cost.steps import step_operators
from tightfit.engine.disk.disk_sizes import buffer_bytes_for, in_pages
from tightfit.planner.option import Change, Option, merged
from tightfit.tape import Column, CopyDirection, Phase
from tightfit.techniques.offload.streamed_blocks import ALIGNMENT, MIN_BLOCKS, not_hidden, slots_of, smallest_of
from tightfit.techniques.technique import AbstractTechnique, ChosenOption

if TYPE_CHECKING:
    from tightfit.techniques.session import Session

# How many blocks on disk together have the buffers in host memory that one file is moved through.
_BLOCKS_FOR_BUFFERS = 16


@final
class WeightStreaming(AbstractTechnique):
    """Trades host memory or disk, and traffic on the link, for the frozen weights of a block."""

    name = "weight_streaming"
    exact = True
    exactness = "bit for bit: the same values are copied to the GPU"

    def options(self, profile: Profile) -> Iterable[Option]:
        """Two options for each layer that has weights which are not trained: to the host, and to disk."""
        if len(profile.tape.weights):
            yield from _options(self.name, profile)

    def apply(self, session: "Session", chosen: Sequence[ChosenOption]) -> None:
        """Moves the weights of each block to the host, and wraps its forward and those of the blocks beside it."""
        from tightfit.techniques.offload.apply_weight_streaming import apply_weight_streaming

        apply_weight_streaming(session, chosen)


def _options(technique: str, profile: Profile) -> Iterator[Option]:
    uses = StreamedUses(profile)
    if len(uses.blocks) < MIN_BLOCKS:
        return
    paths = [block.path for block in uses.blocks.values()]
    beside = {path: (before, after) for before, path, after in zip(["", *paths], paths, [*paths[1:], ""], strict=False)}
    sizes = profile.tape.storages.num_bytes
    first = _first_operator(profile, uses)
    for number, block in uses.blocks.items():
        smallest = smallest_of(sizes[block.storages])
        streamed = block.storages[sizes[block.storages] >= smallest]
        if not len(streamed):
            continue
        # Each model has a session of its own, which finds no block of another one.
        preceding, following = (
            relative_place(block.path, path) if is_of_same_model(block.path, path) else ""
            for path in beside[block.path]
        )
        for tier in ("host", "disk"):
            yield _option(
                technique,
                profile,
                uses,
                number,
                streamed,
                changes=_changes(profile, uses, number, streamed, first),
                settings={
                    "preceding": preceding,
                    "following": following,
                    "smallest_bytes": smallest,
                    **({"without_gradients": True} if uses.is_prediction else {}),
                },
                to_disk=tier == "disk",
            )


def _option(
    technique: str,
    profile: Profile,
    uses: StreamedUses,
    number: int,
    streamed: Column,
    *,
    changes: tuple[Change, ...],
    settings: Mapping[str, Any],
    to_disk: bool,
) -> Option:
    """The option of streaming these storages of one block from the host's memory, or from disk."""
    block, sizes = uses.blocks[number], profile.tape.storages.num_bytes[streamed]
    num_bytes = profile.lifetimes.bytes_of(streamed)
    host_bytes, disk_bytes = int((-(-sizes // ALIGNMENT) * ALIGNMENT).sum()), 0
    if to_disk:
        disk_bytes = sum(map(in_pages, sizes.tolist()))
        host_bytes = in_pages(buffer_bytes_for(disk_bytes) // _BLOCKS_FOR_BUFFERS)
    sides = not_hidden(profile, uses, number, streamed, from_disk=to_disk)
    kind = f"{settings['preceding']}:{settings['following']}:{'disk' * to_disk}"
    return Option(
        technique=technique,
        where=block.path,
        equivalence_class=f"{technique}:{re.sub(r'[0-9]+', '*', block.path)}#{num_bytes}:{kind}",
        settings={
            **settings,
            "host_bytes": host_bytes,
            **({"tier": "disk", "disk_bytes": disk_bytes} if to_disk else {}),
        },
        changes=changes,
        seconds=profile.step.added(sides),
        sides=sides,
        exact=True,
        slots=slots_of(profile, block),
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
    )


def _first_operator(profile: Profile, uses: StreamedUses) -> int:
    """The operator before which the plan is put on the model."""
    if uses.is_prediction:
        return step_operators(profile.tape)[0][0]
    return int(np.flatnonzero(profile.tape.operators.phase == Phase.FORWARD)[0])


def _changes(profile: Profile, uses: StreamedUses, number: int, streamed: Column, first: int) -> tuple[Change, ...]:
    """The weights leave when the plan is put on the model, before the operator `first`, and are back during their uses. Those that the program moves to the
    card are left at the host."""
    tape, event_of = profile.tape, profile.lifetimes.event_of
    moved = tape.copies.operator[tape.copies.direction == CopyDirection.TO_CARD]
    is_left = np.isin(tape.storages.operator[streamed], moved)
    begins = np.where(is_left, profile.lifetimes.allocated_at[streamed], event_of(first))
    away = (
        Change(begin=begin, end=len(tape.events), num_bytes=-num_bytes)
        for begin, num_bytes in zip(begins.tolist(), profile.lifetimes.block_bytes[streamed].tolist(), strict=True)
    )
    num_bytes = profile.lifetimes.bytes_of(streamed)
    back = (
        Change(begin=int(event_of(begin)), end=int(event_of(end)), num_bytes=num_bytes)
        for begin, end in uses.on_card(number)
    )
    return merged((*away, *back))
