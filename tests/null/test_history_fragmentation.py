"""Where free bytes are: each has one cause, and `empty_cache` returns exactly what is said."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tightfit.allocator.caching import CachingAllocator
from tightfit.allocator.settings import AllocatorSettings
from tightfit.diagnosis.fragmentation import fragmentation_of
from tightfit.units import GIB, KIB, MIB

SIZES = st.sampled_from([700, 100 * KIB, MIB, 3 * MIB, 9 * MIB, 15 * MIB, 43 * MIB])


@settings(max_examples=100, deadline=None)
@given(
    requests=st.lists(st.tuples(SIZES, st.integers(0, 1), st.booleans(), st.booleans()), max_size=40),
    conf=st.sampled_from(["", "expandable_segments:True", "max_split_size_mb:30"]),
    order=st.randoms(use_true_random=False),
)
def test_causes_add_up_and_empty_cache_returns_what_is_said(requests, conf, order):
    allocator = CachingAllocator(AllocatorSettings.parse(conf), capacity_bytes=64 * GIB)
    live = {}
    for number, (num_bytes, stream, frees, crosses) in enumerate(requests):
        live[number] = allocator.malloc(num_bytes, stream)
        if crosses:
            live[number].record_stream(1 - stream)
        if frees:
            allocator.free(live.pop(order.choice(list(live))))
    found = fragmentation_of(allocator, live)
    causes = (found.whole_segments_bytes, found.whole_pages_bytes, found.pinned_bytes)
    assert sum(causes) + found.small_pool_bytes + found.other_streams_bytes == found.free_bytes
    assert found.rounding_bytes == sum(block.size - block.requested_bytes for block in live.values())
    assert sum(pin.pinned_bytes for pin in found.pins) <= found.pinned_bytes
    if not found.waiting_bytes:
        allocator.empty_cache()
        assert allocator.reserved_bytes == found.reserved_bytes - found.returnable_bytes


def test_a_small_block_that_keeps_a_segment_alive_is_named():
    allocator = CachingAllocator(AllocatorSettings())
    first, second = allocator.malloc(9 * MIB), allocator.malloc(3 * MIB)
    allocator.free(first)
    found = fragmentation_of(allocator, {0: second})
    assert (found.reserved_bytes, found.pinned_bytes, found.returnable_bytes) == (20 * MIB, 17 * MIB, 0)
    assert [(pin.address, pin.live_bytes, pin.pinned_bytes) for pin in found.pins] == [
        (second.address, 3 * MIB, 17 * MIB)
    ]


def test_another_streams_cache_is_told_apart():
    allocator = CachingAllocator(AllocatorSettings())
    held = allocator.malloc(30 * MIB, 0)
    allocator.free(allocator.malloc(50 * MIB, 7))
    found = fragmentation_of(allocator, {0: held})
    assert (found.other_streams_bytes, found.whole_segments_bytes) == (50 * MIB, 0)
    assert found.returnable_bytes == found.largest_free_bytes == 50 * MIB


def test_of_an_expandable_segment_whole_pages_come_back():
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=True))
    first, second = allocator.malloc(70 * MIB), allocator.malloc(5 * MIB)
    allocator.free(first)
    found = fragmentation_of(allocator, {0: second})
    assert found.whole_pages_bytes == found.returnable_bytes == 60 * MIB
    assert found.pinned_bytes == found.free_bytes - 60 * MIB
    assert found.pins[0].address == second.address
