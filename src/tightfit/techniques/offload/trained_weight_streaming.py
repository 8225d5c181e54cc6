"""Trained weight streaming: the weights, gradients and optimizer states of whole blocks live in host memory; weights come to the card one block ahead.

The states may be on disk, and the weights too: they come to the host for the update of their parameter.

Rajbhandari et al., "ZeRO-Infinity" (arXiv:2104.07857), on one card, with the update on the host's processor as in Ren et al., "ZeRO-Offload"
(arXiv:2101.06840): gradients leave as they are made, and the optimizer updates what is at the host there. Nothing is copied to a second place.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, final

import numpy as np

from tightfit.analysis.gradient_readers import updates_in_backward
from tightfit.analysis.optimizer_algorithm import element_bytes_of, family_of
from tightfit.analysis.profile import Profile
from tightfit.analysis.streamed_uses import StreamedUses
from tightfit.cost.copies import copy_seconds
from tightfit.cost.disks import disk_seconds
from tightfit.cost.host_bandwidth import HOST_BYTES_PER_SECOND
from tightfit.engine.disk.disk_sizes import buffer_bytes_for, in_pages
from tightfit.planner.option import Change, Option, merged
from tightfit.planner.sides import Sides
from tightfit.tape import Category, Column, CopyDirection, Phase
from tightfit.techniques.offload.streamed_blocks import ALIGNMENT, MIN_BLOCKS, not_hidden, slots_of, smallest_of
from tightfit.techniques.optimizer.states.state_sizes import MIN_ON_DISK
from tightfit.techniques.technique import AbstractTechnique, ChosenOption, Needs

if TYPE_CHECKING:
    from tightfit.techniques.session import Session

# How many of the blocks are streamed, the first ones: the last are used last in the forward pass and first in the backward pass.
_SHARES = (1.0, 0.75, 0.5, 0.25)
# At the host, the states of so many of the largest parameter: what comes from disk, is updated, and leaves.
_WINDOW = 3
# Of weights on disk, so much is updated at a time: for each there is a wait for the disk.
_AT_ONCE_BYTES = 64 << 20


@final
class TrainedWeightStreaming(AbstractTechnique):
    """Trades host memory, traffic on the link and the host's processor for the weights, gradients and states of blocks."""

    name = "trained_weight_streaming"
    exact = True
    needs = Needs.STEPS
    exactness = "the same values are copied, bit for bit; the optimizer updates them on the host, up to rounding with its fused implementation there"
    tolerance = 0.15

    def options(self, profile: Profile) -> Iterable[Option]:
        """All blocks of a model, three quarters of them, a half, and a quarter; each with the optimizer's states at the host, on disk, and with the weights on disk too."""
        run = profile.optimizer
        if len(profile.tape.weights) and run.step_ranges and not updates_in_backward(run) and family_of(run) != "other":
            yield from _options(self.name, profile)

    def apply(self, session: "Session", chosen: Sequence[ChosenOption]) -> None:
        """Moves the weights of the blocks to the host, and wraps their forwards and the optimizers' steps."""
        from tightfit.techniques.offload.apply_trained_weight_streaming import apply_trained_weight_streaming

        apply_trained_weight_streaming(session, chosen)


def _options(technique: str, profile: Profile) -> Iterator[Option]:
    uses = StreamedUses(profile, with_trained=True)
    numbers = [number for number, block in uses.blocks.items() if len(block.storages)]
    roots = {uses.blocks[number].path.partition(".")[0] for number in numbers}
    if len(numbers) < MIN_BLOCKS or len(roots) != 1:
        return
    (root,) = roots
    sizes = profile.tape.storages.num_bytes
    smallest = min(smallest_of(sizes[uses.blocks[number].storages]) for number in numbers)
    for count in dict.fromkeys(round(share * len(numbers)) for share in _SHARES):
        taken = numbers[:count]
        streamed = {number: _at_least(sizes, uses.blocks[number].storages, smallest) for number in taken}
        streamed = {number: storages for number, storages in streamed.items() if len(storages)}
        if len(streamed) < MIN_BLOCKS:
            return
        yield from _options_of(technique, profile, uses, streamed, root, smallest)


def _at_least(sizes: Column, storages: Column, smallest: int) -> Column:
    return storages[sizes[storages] >= smallest]


def _options_of(
    technique: str, profile: Profile, uses: StreamedUses, streamed: dict[int, Column], root: str, smallest: int
) -> Iterator[Option]:
    """The option of streaming these storages of blocks, with the optimizer's states at the host, and the one with them on disk."""
    run, sizes = profile.optimizer, profile.tape.storages.num_bytes
    everything = np.concatenate(list(streamed.values()))
    of_weights = int((-(-sizes[everything] // ALIGNMENT) * ALIGNMENT).sum())
    # Their share of the states, which a tape does not give to parameters.
    states = run.state(run.step_ranges[-1])
    gradients = run.gradients(run.step_ranges[-1])
    weight_bytes = int(sizes[everything].sum())
    share = min(1.0, weight_bytes / max(1, int(sizes[gradients].sum())))
    state_bytes = int(share * int(sizes[states].sum()))
    changes = [change for number, own in streamed.items() for change in _changes_of_block(profile, uses, number, own)]
    changes += [
        Change(
            begin=int(profile.lifetimes.allocated_at[s]),
            end=int(profile.lifetimes.freed_at[s]),
            num_bytes=-round(share * int(n)),
        )
        for s, n in zip(states.tolist(), profile.lifetimes.block_bytes[states].tolist(), strict=True)
    ]
    for step_range in run.step_ranges:
        changes += [Change(begin=begin, end=end, num_bytes=-round(share * n)) for begin, end, n in run.held(step_range)]
    moved = (not_hidden(profile, uses, number, own) for number, own in streamed.items())
    sides = sum(moved, Sides(on_card=_not_hidden_of_gradients(profile, uses, streamed)))
    # Each weight and state is read and written, the gradient is read; the card updates the rest meanwhile.
    on_host = (3 * weight_bytes + 2 * state_bytes) / HOST_BYTES_PER_SECOND
    sides += Sides.both(on_host) - run.sides * share
    at_host = Option(
        technique=technique,
        where=root,
        settings={
            "blocks": [uses.blocks[number].path.partition(".")[2] for number in streamed],
            "smallest_bytes": smallest,
            "host_bytes": 2 * of_weights,
            "kernel": "fused",
        },
        changes=merged(changes),
        seconds=profile.step.added(sides),
        sides=sides,
        exact=True,
        slots=frozenset({"optimizer"}).union(*(slots_of(profile, uses.blocks[number]) for number in streamed)),
        host_bytes=2 * of_weights + state_bytes,
    )
    yield at_host
    last = at_host
    large = sizes[everything][sizes[everything] >= MIN_ON_DISK * element_bytes_of(run)]
    num_states = round(state_bytes / max(1, weight_bytes))
    if num_states and len(large):
        last = _with_states_on_disk(profile, at_host, large, num_states, state_bytes, on_host)
        yield last
    # States are more bytes than weights, and are moved less often.
    seen = sum((not_hidden(profile, uses, number, own) for number, own in streamed.items()), Sides())
    read = sum((not_hidden(profile, uses, number, own, from_disk=True) for number, own in streamed.items()), Sides())
    yield _with_weights_on_disk(profile, last, sizes[everything], of_weights, read - seen)


def _with_states_on_disk(
    profile: Profile, at_host: Option, large: Column, num_states: int, state_bytes: int, seconds_on_host: float
) -> Option:
    """States of small weights stay at the host, those of a few others are there while they are updated."""
    disk_bytes = num_states * sum(map(in_pages, large.tolist()))
    window = _WINDOW * num_states * int(large.max())
    beside = max(0, state_bytes - disk_bytes) + window + buffer_bytes_for(disk_bytes)
    # The disk either reads or writes, beside the updates.
    moved = disk_seconds(disk_bytes, to_disk=True) + disk_seconds(disk_bytes, to_disk=False)
    sides = at_host.added_sides + Sides.both(max(0.0, moved - seconds_on_host))
    return dataclasses.replace(
        at_host,
        settings={**at_host.settings, "tier": "disk", "disk_bytes": disk_bytes, "window_bytes": window},
        seconds=profile.step.added(sides),
        sides=sides,
        host_bytes=at_host.settings["host_bytes"] + beside,
        disk_bytes=disk_bytes,
    )


def _with_weights_on_disk(
    profile: Profile, before: Option, sizes: Column, of_weights: int, not_hidden: Sides
) -> Option:
    """As `before`, with the weights on disk: a few of them are at the host while they are updated. `not_hidden` is what reading them takes longer than copying them."""
    weight_bytes, disk_bytes = int(sizes.sum()), sum(map(in_pages, sizes.tolist()))
    # With states on disk one weight is updated after the other.
    at_once = int(sizes.max()) if before.disk_bytes else max(int(sizes.max()), min(weight_bytes, _AT_ONCE_BYTES))
    # Before and behind the updates, which wait.
    moved = disk_seconds(weight_bytes, to_disk=True) + disk_seconds(weight_bytes, to_disk=False)
    sides = before.added_sides + not_hidden + Sides.both(moved)
    return dataclasses.replace(
        before,
        settings={
            **before.settings,
            "weights": "disk",
            "host_bytes": before.settings["host_bytes"] - of_weights,
            "at_once_bytes": at_once,
        },
        seconds=profile.step.added(sides),
        sides=sides,
        host_bytes=before.host_bytes - of_weights + buffer_bytes_for(disk_bytes) + at_once,
        disk_bytes=before.disk_bytes + disk_bytes,
    )


def _changes_of_block(profile: Profile, uses: StreamedUses, number: int, streamed: Column) -> Iterator[Change]:
    """Weights leave when the plan is put on the model, and are back during their uses; gradients leave at the end of the use that makes them, and
    are gone when the following one begins."""
    tape, event_of = profile.tape, profile.lifetimes.event_of
    first = int(np.flatnonzero(tape.operators.phase == Phase.FORWARD)[0])
    moved = tape.copies.operator[tape.copies.direction == CopyDirection.TO_CARD]
    is_left = np.isin(tape.storages.operator[streamed], moved)
    begins = np.where(is_left, profile.lifetimes.allocated_at[streamed], event_of(first))
    for begin, num_bytes in zip(begins.tolist(), profile.lifetimes.block_bytes[streamed].tolist(), strict=True):
        yield Change(begin=begin, end=len(tape.events), num_bytes=-num_bytes)
    num_bytes = profile.lifetimes.bytes_of(streamed)
    for begin, end in uses.on_card(number):
        yield Change(begin=int(event_of(begin)), end=int(event_of(end)), num_bytes=num_bytes)
    smallest = int(tape.storages.num_bytes[streamed].min())
    made = tape.storages.operator
    is_gradient = (tape.storages.category == Category.GRADIENTS) & (tape.storages.num_bytes >= smallest)
    for at, use in enumerate(uses.uses):
        if use.block != number or not use.is_backward:
            continue
        own = np.flatnonzero(is_gradient & (made >= use.begin) & (made < use.end))
        following = uses.uses[at + 1] if at + 1 < len(uses.uses) else None
        gone = following.end if following is not None and following.is_backward else _end_of_backward(profile, use.end)
        begin = int(event_of(gone))
        for storage in own.tolist():
            end = int(profile.lifetimes.freed_at[storage])
            if end > begin:
                yield Change(begin=begin, end=end, num_bytes=-int(profile.lifetimes.block_bytes[storage]))


def _end_of_backward(profile: Profile, operator: int) -> int:
    rest = profile.tape.operators.phase[operator:] != Phase.BACKWARD
    return operator + (int(rest.argmax()) if rest.any() else len(rest))


def _not_hidden_of_gradients(profile: Profile, uses: StreamedUses, streamed: dict[int, Column]) -> float:
    """Seconds in a step for the gradients on the way to the host beyond what the following block's part of the backward pass takes."""
    found = 0.0
    backward = [use for use in uses.uses if use.is_backward]
    for at, use in enumerate(backward):
        if use.block in streamed:
            copy = copy_seconds(profile.lifetimes.bytes_of(streamed[use.block]), profile.device, to_card=False)
            following = backward[at + 1] if at + 1 < len(backward) else None
            beside = (
                float(profile.costs.seconds[following.begin : following.end].sum()) if following is not None else 0.0
            )
            found += max(0.0, copy - beside)
    return found / profile.num_steps
