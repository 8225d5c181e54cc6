"""From a tape to an estimate: peaks, who holds them, spans, workspaces that give way, and the band."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tightfit.allocator.settings import AllocatorSettings
from tightfit.devices.calibration import Calibration
from tightfit.devices.catalogue import find
from tightfit.devices.device import Context
from tightfit.errors import UsageError
from tightfit.simulate.band import doubtful_bytes
from tightfit.simulate.peak import estimate_peak
from tightfit.simulate.timeline_bytes import MemoryTimeline, replay_timeline
from tightfit.tape import Category, EventKind, Events, Operators, Phase, Source, SpanKind, Spans, Storages, Tape
from tightfit.units import GIB, MIB

STRINGS = ("", "aten.mm", "Model.layers.0", "train.py:7", "float32", "step 1", "step 2", "Model.layers.1")


def tape_of(sizes, events, *, categories=None, sources=None, ranges=None, spans=None) -> Tape:
    """A tape of one operator per storage; `events` are storage numbers, negative ones (minus one) for frees."""
    kinds = [EventKind.ALLOCATE if e >= 0 else EventKind.FREE for e in events]
    storages = [e if e >= 0 else -e - 1 for e in events]
    num_operators = len(sizes)
    issued, counts = 0, []
    for kind in kinds:
        issued = min(num_operators, issued + (kind == EventKind.ALLOCATE))
        counts.append(issued)
    ranges = ranges or [(s, s) for s in sizes]
    column = dict.fromkeys(("dtype", "stream", "flops", "bytes_read", "bytes_written"), [0] * num_operators)
    return Tape(
        target="toy.py:workload",
        versions={"torch": "2.13.0"},
        traced_for="RTX 4090",
        strings=STRINGS,
        operators=Operators.from_columns(
            column
            | {
                "name": [1] * num_operators,
                "module": [2 if i % 2 else 7 for i in range(num_operators)],
                "line": [3] * num_operators,
                "phase": [Phase.FORWARD] * num_operators,
            }
        ),
        storages=Storages.from_columns(
            {
                "num_bytes": sizes,
                "low_bytes": [low for low, _ in ranges],
                "high_bytes": [high for _, high in ranges],
                "category": categories or [Category.TEMPORARIES] * len(sizes),
                "source": sources or [Source.TENSOR] * len(sizes),
                "operator": list(range(len(sizes))),
                "stream": [0] * len(sizes),
            }
        ),
        events=Events.from_columns(
            {"kind": kinds, "storage": storages, "operator": counts, "value": [0] * len(events)}
        ),
        spans=Spans.from_columns(
            {
                k: [row[i] for row in (spans or [(5, SpanKind.STEP, 0, len(events))])]
                for i, k in enumerate(("name", "kind", "begin", "end"))
            }
        ),
        assumptions=(),
        host_peak_bytes=11,
    )


def test_the_peak_is_split_by_category_and_adds_up():
    tape = tape_of(
        [100 * MIB, 50 * MIB, 10 * MIB],
        [0, 1, -2, 2],
        categories=[Category.PARAMETERS, Category.ACTIVATIONS, Category.GRADIENTS],
    )
    estimate = estimate_peak(tape, find("RTX 4090"))
    assert estimate.peak.allocated_bytes == 150 * MIB
    assert estimate.peak.reserved_bytes == 150 * MIB
    assert estimate.at_peak["parameters"] == 100 * MIB
    assert estimate.at_peak["activations"] == 50 * MIB
    assert estimate.at_peak["gradients"] == 0
    assert sum(estimate.at_peak.values()) == estimate.peak.device_bytes
    assert estimate.fits
    assert estimate.headroom_bytes == estimate.capacity_bytes - estimate.peak.device_bytes


def test_the_moment_and_the_holders_name_the_program():
    estimate = estimate_peak(tape_of([30 * MIB, 20 * MIB, 20 * MIB], [0, 1, 2]), find("RTX 4090"))
    assert estimate.moment.span == "step 1"
    assert (estimate.moment.operator, estimate.moment.line) == ("aten.mm", "train.py:7")
    (holder,) = estimate.allocation_sites
    assert (holder.module, holder.num_storages, holder.num_bytes) == ("Model.layers.*", 3, 70 * MIB)


def test_pieces_of_an_interrupted_step_are_one_entry():
    spans = [(5, SpanKind.STEP, 0, 1), (6, SpanKind.ASIDE, 1, 2), (5, SpanKind.STEP, 2, 4)]
    estimate = estimate_peak(tape_of([10 * MIB, 40 * MIB], [0, 1, -2, -1], spans=spans), find("RTX 4090"))
    assert [(s.name, s.kind) for s in estimate.spans] == [("step 1", "step"), ("step 2", "aside")]
    assert estimate.spans[0].peak_allocated_bytes == 10 * MIB
    assert estimate.spans[1].peak_allocated_bytes == 50 * MIB
    assert estimate.spans[0].end_allocated_bytes == 0
    assert len(estimate.to_json()["steps"]) == 1


def test_a_workspace_gives_way_when_memory_is_short():
    card = find("RTX 4060")
    room = card.capacity_bytes - card.context_bytes
    tensor, workspace = room - 200 * MIB, 500 * MIB
    sizes = {"sources": [Source.TENSOR, Source.CUDNN], "ranges": [(tensor, tensor), (0, workspace)]}
    estimate = estimate_peak(tape_of([tensor, workspace], [0, 1, -2], **sizes), card)
    assert estimate.fits
    assert estimate.peak.allocated_bytes < room
    roomy = estimate_peak(tape_of([tensor, workspace], [0, 1, -2], **sizes), find("RTX 4090"))
    assert roomy.peak.allocated_bytes >= tensor + workspace


def test_what_does_not_fit_is_said_in_full():
    card = find("RTX 4060")
    estimate = estimate_peak(tape_of([6 * GIB, 6 * GIB], [0, 1]), card)
    assert not estimate.fits
    assert estimate.peak.reserved_bytes == 12 * GIB
    assert estimate.headroom_bytes < 0


@pytest.mark.parametrize("way", ["program", "settings"])
def test_a_fraction_of_the_memory_is_what_the_allocator_may_hold(way):
    tape = tape_of([3 * GIB], [0, ~0])
    card, share = find("RTX 4090"), 0.1
    assert estimate_peak(tape, card).fits
    if way == "program":
        found = estimate_peak(dataclasses.replace(tape, memory_fraction=share), card)
    else:
        found = estimate_peak(tape, card, AllocatorSettings(per_process_memory_fraction=share))
    assert not found.fits
    assert found.capacity_bytes == int(share * card.capacity_bytes) + card.context_bytes
    # Of all of the memory, also of what other processes have.
    left = dataclasses.replace(card, capacity_bytes=card.capacity_bytes - 4 * GIB)
    tape = dataclasses.replace(tape, memory_fraction=share)
    assert estimate_peak(tape, left, used_bytes=4 * GIB).capacity_bytes == found.capacity_bytes


@pytest.mark.parametrize("way", ["program", "settings"])
def test_a_fraction_is_taken_once_and_only_below_it_is_garbage_collected(way):
    card, share = find("RTX 4090"), 0.5
    # Together beyond the half of the card, each below it and the second beyond the half of the half.
    tape = tape_of([5 * GIB, 8 * GIB], [0, ~0, 1])
    threshold = AllocatorSettings(garbage_collection_threshold=0.1)
    # Without a share torch leaves what is cached, whatever the threshold.
    assert estimate_peak(tape, card, threshold).peak.reserved_bytes == 13 * GIB
    for chosen in (AllocatorSettings(), threshold):
        if way == "program":
            found = estimate_peak(dataclasses.replace(tape, memory_fraction=share), card, chosen)
        else:
            found = estimate_peak(tape, card, dataclasses.replace(chosen, per_process_memory_fraction=share))
        assert found.fits
        assert found.peak.reserved_bytes == 8 * GIB


def test_the_band_has_a_cause_for_every_byte():
    tape = tape_of(
        [64 * MIB, 64 * MIB],
        [0, 1, -2],
        sources=[Source.TENSOR, Source.CUDNN],
        ranges=[(64 * MIB,) * 2, (0, 256 * MIB)],
    )
    estimate = estimate_peak(tape, find("RTX 4090"))
    band = {b.cause: b for b in estimate.band}
    assert band["choice of library workspaces"].less_bytes == 64 * MIB
    assert band["choice of library workspaces"].more_bytes == 192 * MIB
    assert estimate.peak.device_low_bytes <= estimate.peak.device_bytes <= estimate.peak.device_high_bytes


def test_a_segment_that_free_pieces_could_have_held_is_doubtful():
    def timeline(allocated: list[int], reserved: list[int]) -> MemoryTimeline:
        return MemoryTimeline(
            allocated=np.asarray(allocated), reserved=np.asarray(reserved), block_bytes=np.asarray([]), num_returned=0
        )

    def doubtful(allocated: list[int], reserved: list[int]) -> int:
        return doubtful_bytes(timeline([a * MIB for a in allocated], [r * MIB for r in reserved])) // MIB

    assert doubtful([100, 10, 60], [100, 100, 150]) == 50
    assert doubtful([100, 90, 140], [100, 100, 150]) == 0
    assert doubtful([100], [100]) == 0
    assert doubtful([], []) == 0


def test_a_small_segment_that_comes_last_does_not_hide_a_doubtful_one():
    allocated, reserved = np.asarray([100, 10, 60, 61]) * MIB, np.asarray([100, 100, 150, 152]) * MIB
    assert (
        doubtful_bytes(
            MemoryTimeline(allocated=allocated, reserved=reserved, block_bytes=np.asarray([]), num_returned=0)
        )
        == 50 * MIB
    )


def test_a_calibration_replaces_the_context():
    tape = tape_of([64 * MIB], [0])
    card = find("RTX 4090")
    context = Context(num_bytes=GIB, low_bytes=GIB - 5, high_bytes=GIB + 7, is_measured=True)
    peak = estimate_peak(tape, card, calibration=Calibration(device=card.name, context=context)).peak
    assert peak.device_bytes == peak.reserved_bytes + GIB
    assert (peak.device_low_bytes, peak.device_high_bytes) == (peak.device_bytes - 5, peak.device_bytes + 7)
    with pytest.raises(UsageError, match="was made on T4, not on"):
        estimate_peak(tape, card, calibration=Calibration(device="T4"))


def test_the_workspace_of_cublas_is_that_of_the_card_asked_about():
    tape = tape_of([8_519_680, 3 * MIB], [0, 1], sources=[Source.CUBLAS, Source.CUBLAS])
    ada, hopper = (estimate_peak(tape, find(name)) for name in ("RTX 4090", "H200"))
    assert ada.peak.allocated_bytes == 8_519_680 + 3 * MIB
    assert hopper.peak.allocated_bytes == 32 * MIB + 3 * MIB, "a size that the user has set stays"


def test_an_empty_tape_costs_its_context():
    tape = tape_of([], [], spans=[(5, SpanKind.STEP, 0, 0)])
    empty = dataclasses.replace(tape, spans=Spans.from_columns({"name": [], "kind": [], "begin": [], "end": []}))
    card = find("RTX 4090")
    assert estimate_peak(empty, card).peak.device_bytes == card.context_bytes


@pytest.mark.parametrize("seed", range(3))
def test_levels_are_those_of_the_allocator(seed):
    generator = np.random.default_rng(seed)
    sizes = generator.integers(1, 64 * MIB, 40).tolist()
    tape = tape_of(sizes, [*range(40), *(-1 - i for i in generator.permutation(40).tolist())])
    timeline = replay_timeline(tape, AllocatorSettings())
    assert timeline.allocated[-1] == 0
    assert timeline.reserved[39] >= timeline.allocated[39] >= sum(sizes)
    assert timeline.reserved[-1] == timeline.reserved[39]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40 * MIB), min_size=1, max_size=25), st.randoms(use_true_random=False))
def test_the_likely_peak_is_always_inside_its_band(sizes, random):
    alive, events = [], []
    for storage in range(len(sizes)):
        events.append(storage)
        alive.append(storage)
        if random.random() < 0.5:
            events.append(-1 - alive.pop(random.randrange(len(alive))))
    peak = estimate_peak(tape_of(sizes, events), find("A100")).peak
    assert peak.device_low_bytes <= peak.device_bytes <= peak.device_high_bytes
    assert peak.allocated_bytes <= peak.reserved_bytes <= peak.device_bytes
