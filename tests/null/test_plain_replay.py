"""The loop for the default settings says what the allocator that knows all settings says, event by event."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tightfit.allocator.caching import CachingAllocator, OutOfDeviceMemory
from tightfit.allocator.plain_replay import BeyondPlain, PlainReplay, is_plain
from tightfit.allocator.replay_tape import TapeReplay
from tightfit.allocator.settings import AllocatorSettings
from tightfit.tape import EventKind
from tightfit.units import KIB, MIB

SIZES = st.one_of(
    st.integers(0, 4 * KIB),
    st.integers(0, 2 * MIB),
    st.integers(MIB, 64 * MIB),
    st.sampled_from([0, 1, 512, 513, MIB, MIB + 1, 10 * MIB, 10 * MIB - 512, 20 * MIB, 24 * MIB, 10 << 30]),
)


def program(seed, sizes, streams, share_of_frees, share_of_others):
    """Events in which each storage is allocated once, and some are freed, beside synchronisations and emptied caches."""
    draw = random.Random(seed)
    events, alive, following = [], [], 0
    while following < len(sizes):
        if draw.random() < share_of_others:
            events.append((draw.choice([EventKind.SYNCHRONIZE, EventKind.EMPTY_CACHE]), -1))
        elif alive and draw.random() < share_of_frees:
            events.append((EventKind.FREE, alive.pop(draw.randrange(len(alive)))))
        else:
            events.append((EventKind.ALLOCATE, following))
            alive.append(following)
            following += 1
    return [(int(kind), storage) for kind, storage in events]


def by_reference(events, sizes, streams, capacity):
    """After each event: allocated and reserved bytes; and the sizes of the blocks."""
    replay = TapeReplay(CachingAllocator(AllocatorSettings(), capacity_bytes=capacity))
    levels, blocks = [], [0] * len(sizes)
    for kind, storage in events:
        if storage < 0 or sizes[storage]:
            replay.feed(kind, storage, sizes, streams, 0)
            if kind == EventKind.ALLOCATE:
                blocks[storage] = replay.blocks[storage].size
        levels.append(replay.allocator.reserved_bytes)
    return levels, blocks


@settings(max_examples=60, deadline=None)
@given(
    st.lists(SIZES, min_size=1, max_size=60),
    st.integers(0, 1 << 16),
    st.floats(0.2, 0.8),
    st.sampled_from([0.0, 0.1]),
    st.booleans(),
)
def test_both_reserve_and_hand_out_the_same(sizes, seed, share_of_frees, share_of_others, has_streams):
    streams = [number % 3 - 1 if has_streams else 0 for number in range(len(sizes))]
    events = program(seed, sizes, streams, share_of_frees, share_of_others)
    reserved, blocks = by_reference(events, sizes, streams, None)
    replay = PlainReplay(len(sizes), None)
    replay.run(events, sizes, streams)
    assert replay.block_bytes == blocks
    steps = dict(replay.reserved)
    level, levels = 0, []
    for at in range(len(events)):
        level = steps.get(at, level)
        levels.append(level)
    assert levels == reserved
    # At its own peak it still fits; with less, the other one has to free its cache, or to give up.
    PlainReplay(len(sizes), max(reserved)).run(events, sizes, streams)
    if max(reserved):
        with pytest.raises(BeyondPlain):
            PlainReplay(len(sizes), max(reserved) - 1).run(events, sizes, streams)


def test_what_waits_for_another_stream_is_left_to_the_reference():
    replay = PlainReplay(1, None)
    with pytest.raises(BeyondPlain):
        replay.run([(int(EventKind.ALLOCATE), 0), (int(EventKind.USE), 0)], [MIB], [0])


@pytest.mark.parametrize("text", ["expandable_segments:True", "max_split_size_mb:64", "large_segment_size_mb:44"])
def test_other_settings_are_left_to_the_reference(text):
    assert is_plain(AllocatorSettings())
    assert not is_plain(AllocatorSettings.parse(text))


def test_a_limit_ends_the_reference_as_well():
    with pytest.raises(OutOfDeviceMemory):
        by_reference([(int(EventKind.ALLOCATE), 0)], [30 * MIB], [0], 20 * MIB)
