"""The rules of torch's caching allocator, one case each with the bytes worked out by hand."""

import pytest

from tightfit.allocator.caching import CachingAllocator, OutOfDeviceMemory
from tightfit.allocator.pools import rounded, segment_bytes
from tightfit.allocator.settings import AllocatorSettings
from tightfit.units import KIB, MIB


def allocator_with(conf="", **limits):
    return CachingAllocator(AllocatorSettings.parse(conf), **limits)


@pytest.mark.parametrize(
    ("asked", "size"), [(0, 512), (1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)]
)
def test_requests_are_rounded_to_512_bytes(asked, size):
    assert allocator_with().malloc(asked).size == size
    assert rounded(asked, (0,) * 16) == size


@pytest.mark.parametrize(
    ("asked", "divisions", "size"),
    [
        (1200 * KIB, 4, 1280 * KIB),
        (1280 * KIB, 4, 1280 * KIB),
        (4 * MIB, 4, 4 * MIB),
        (5 * MIB + 1, 2, 6 * MIB),
        (7 * MIB, 2, 8 * MIB),
        (1500, 2, 1536),
        (1024, 2, 1024),
        (5000, 1, 5120),
        (5000, 0, 5120),
    ],
)
def test_power_of_two_divisions_round_further(asked, divisions, size):
    assert rounded(asked, (divisions,) * 16) == size
    if divisions:
        assert allocator_with(f"roundup_power2_divisions:{divisions}").malloc(asked).size == size


def test_divisions_differ_by_interval():
    allocator = allocator_with("roundup_power2_divisions:[1:4,4:2,>:1]")
    assert [allocator.malloc(n * MIB + 1).size / MIB for n in (1, 2, 5, 9)] == [1.25, 2 + 512 / MIB, 6, 9 + 512 / MIB]


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
    ],
)
def test_segments_come_in_three_sizes(size, segment):
    assert segment_bytes(size, 20 * MIB) == segment
    allocator = allocator_with()
    allocator.malloc(size)
    assert allocator.segments == {segment: 1}
    assert allocator.reserved_bytes == segment


def test_the_size_of_large_segments_can_be_set():
    allocator = allocator_with("large_segment_size_mb:64")
    allocator.malloc(2 * MIB)
    allocator.malloc(600)
    allocator.malloc(12 * MIB)
    assert allocator.segments == {64 * MIB: 1, 2 * MIB: 1}


def test_best_fit_takes_the_smallest_and_then_the_lowest():
    allocator = allocator_with()
    blocks = [allocator.malloc(n * MIB) for n in (30, 12, 12, 40)]
    for block in blocks:
        allocator.free(block)
    taken = allocator.malloc(11 * MIB + 600 * KIB)
    assert taken.address == blocks[1].address
    assert allocator.malloc(11 * MIB + 600 * KIB).address == blocks[2].address
    assert allocator.malloc(13 * MIB).address == blocks[0].address
    assert allocator.reserved_bytes == 94 * MIB


def test_large_blocks_are_split_only_when_more_than_a_mebibyte_stays():
    allocator = allocator_with()
    exact = allocator.malloc(19 * MIB)
    assert (exact.size, exact.next) == (20 * MIB, None)
    split = allocator.malloc(19 * MIB - 512)
    assert (split.size, split.next.size) == (19 * MIB - 512, MIB + 512)


def test_small_blocks_are_split_to_the_last_512_bytes():
    allocator = allocator_with()
    first, second = allocator.malloc(MIB), allocator.malloc(MIB - 512)
    assert second.address == first.address + MIB
    assert second.next.size == 512
    assert allocator.malloc(1).address == second.address + MIB - 512
    assert allocator.reserved_bytes == 2 * MIB


def test_freed_neighbours_become_one_block():
    allocator = allocator_with()
    blocks = [allocator.malloc(4 * MIB) for _ in range(5)]
    start = blocks[0].address
    for index in (1, 3, 2):
        allocator.free(blocks[index])
    assert [(b.address - start, b.size) for b in allocator.pools.of(0, is_small=False).free_blocks()] == [
        (4 * MIB, 12 * MIB)
    ]
    assert allocator.inactive_split_bytes == 12 * MIB
    for index in (0, 4):
        allocator.free(blocks[index])
    assert allocator.inactive_split_bytes == 0
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.num_segments) == (0, 0)


def test_streams_share_nothing():
    allocator = allocator_with()
    allocator.free(allocator.malloc(12 * MIB, stream=7))
    allocator.malloc(12 * MIB, stream=8)
    assert allocator.reserved_bytes == 24 * MIB
    allocator.malloc(12 * MIB, stream=7)
    assert allocator.reserved_bytes == 24 * MIB


def test_blocks_above_max_split_size_are_kept_whole_for_requests_of_their_size():
    allocator = allocator_with("max_split_size_mb:32")
    large = allocator.malloc(60 * MIB)
    allocator.free(large)
    allocator.malloc(30 * MIB)
    assert allocator.segments == {60 * MIB: 1, 30 * MIB: 1}
    # 60 MiB are not below 40 + 20 MiB of rounding, and are below 42 + 20.
    assert allocator.malloc(40 * MIB).size == 40 * MIB
    assert allocator.malloc(42 * MIB) is large
    assert large.size == 60 * MIB


def test_a_wider_rounding_lets_a_request_take_a_larger_block():
    allocator = allocator_with("max_split_size_mb:32,max_non_split_rounding_mb:30")
    large = allocator.malloc(60 * MIB)
    allocator.free(large)
    assert allocator.malloc(32 * MIB) is large


def test_record_stream_delays_reuse_until_the_streams_have_caught_up():
    allocator = allocator_with()
    block = allocator.malloc(12 * MIB)
    block.record_stream(3)
    allocator.free(block)
    assert (allocator.allocated_bytes, allocator.active_bytes, allocator.requested_bytes) == (0, 12 * MIB, 12 * MIB)
    other = allocator.malloc(12 * MIB)
    assert other is not block
    assert allocator.peak_active_bytes == 24 * MIB
    allocator.synchronize()
    assert (allocator.active_bytes, allocator.requested_bytes) == (12 * MIB, 12 * MIB)
    assert allocator.malloc(12 * MIB) is block


def test_a_free_that_an_emptied_cache_completed_is_not_completed_for_the_next_owner():
    allocator = allocator_with()
    first = allocator.malloc(20 * MIB)
    first.record_stream(1)
    uses = first.uses
    allocator.free(first)
    allocator.synchronize()
    second = allocator.malloc(20 * MIB)
    second.record_stream(1)
    allocator.free(second)
    assert second is first
    allocator.complete(first, uses)
    assert allocator.waiting_bytes == 20 * MIB


def test_use_on_the_own_stream_delays_nothing():
    allocator = allocator_with()
    block = allocator.malloc(12 * MIB, stream=3)
    block.record_stream(3)
    allocator.free(block)
    assert allocator.malloc(12 * MIB, stream=3) is block


def test_emptying_the_cache_waits_for_other_streams():
    allocator = allocator_with()
    block = allocator.malloc(12 * MIB)
    block.record_stream(3)
    allocator.free(block)
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.active_bytes) == (0, 0)


def test_at_the_limit_the_cache_is_given_back_and_the_request_retried():
    allocator = allocator_with(capacity_bytes=50 * MIB)
    cached = allocator.malloc(30 * MIB)
    allocator.free(cached)
    allocator.malloc(40 * MIB)
    assert (allocator.num_alloc_retries, allocator.reserved_bytes) == (1, 40 * MIB)
    assert allocator.peak_reserved_bytes == 40 * MIB
    # A request of 3 MiB is charged a segment of 20 MiB.
    with pytest.raises(OutOfDeviceMemory) as caught:
        allocator.malloc(3 * MIB)
    error = caught.value
    assert (error.requested_bytes, error.reserved_bytes, error.allocated_bytes, error.free_bytes) == (
        3 * MIB,
        40 * MIB,
        40 * MIB,
        10 * MIB,
    )
    assert (allocator.num_alloc_retries, allocator.num_ooms) == (2, 1)
    allocator.malloc(10 * MIB)
    assert allocator.reserved_bytes == 50 * MIB


def test_a_partly_used_segment_cannot_be_given_back():
    allocator = allocator_with(capacity_bytes=30 * MIB)
    kept, freed = allocator.malloc(2 * MIB), allocator.malloc(8 * MIB)
    allocator.free(freed)
    with pytest.raises(OutOfDeviceMemory):
        allocator.malloc(19 * MIB)
    assert kept.size == 2 * MIB
    assert allocator.reserved_bytes == 20 * MIB


def test_oversize_blocks_are_given_back_before_everything_is():
    allocator = allocator_with("max_split_size_mb:20", capacity_bytes=100 * MIB)
    blocks = [allocator.malloc(n * MIB) for n in (24, 26, 28, 10)]
    for block in blocks:
        allocator.free(block)
    # 50 MiB do not fit beside 88; the two largest, 28 and 26, are given back.
    allocator.malloc(50 * MIB)
    assert allocator.num_alloc_retries == 0
    assert allocator.reserved_bytes == (24 + 10 + 50) * MIB


def test_a_fraction_bounds_what_the_card_has():
    allocator = allocator_with("per_process_memory_fraction:0.5", total_bytes=80 * MIB)
    assert allocator.capacity_bytes == 40 * MIB
    allocator.malloc(40 * MIB)
    with pytest.raises(OutOfDeviceMemory):
        allocator.malloc(1)


def test_garbage_collection_gives_back_what_is_older_than_average():
    allocator = allocator_with("garbage_collection_threshold:0.5", capacity_bytes=200 * MIB)
    old, young, used = (allocator.malloc(n * MIB) for n in (40, 60, 30))
    allocator.free(old)
    for _ in range(3):
        allocator.free(used)
        used = allocator.malloc(30 * MIB)
    allocator.free(young)
    # 130 MiB are reserved, above the threshold of 100. `old` has waited for 4 searches, `young` for 1: the mean is 2.5.
    allocator.malloc(70 * MIB)
    assert allocator.segments == {40 * MIB: 1, 60 * MIB: 1, 30 * MIB: 1, 70 * MIB: 1}
    assert allocator.reserved_bytes == 160 * MIB
    assert allocator.num_alloc_retries == 0


def test_garbage_collection_goes_on_until_the_target_is_met():
    allocator = allocator_with("garbage_collection_threshold:0.25", capacity_bytes=200 * MIB)
    old, young = allocator.malloc(40 * MIB), allocator.malloc(60 * MIB)
    allocator.free(old)
    allocator.free(allocator.malloc(5 * MIB))
    allocator.free(young)
    allocator.malloc(70 * MIB)
    assert allocator.reserved_bytes == 70 * MIB


def test_garbage_is_collected_in_order_of_streams():
    allocator = allocator_with("garbage_collection_threshold:0.1", capacity_bytes=200 * MIB)
    allocator.driver_log = []
    blocks = [allocator.malloc(40 * MIB, stream) for stream in (2, 1)]
    for block in blocks:
        allocator.free(block)
    allocator.malloc(60 * MIB)
    freed = [address for action, address, _ in allocator.driver_log if action == "segment_free"]
    assert freed == [block.address for block in reversed(blocks)]


def test_searches_of_a_private_pool_age_nothing():
    allocator = allocator_with("garbage_collection_threshold:0.5", capacity_bytes=200 * MIB)
    old, young = allocator.malloc(40 * MIB), allocator.malloc(60 * MIB)
    allocator.free(old)
    allocator.malloc(5 * MIB, -1)
    allocator.free(young)
    # Both are of one age, the average.
    allocator.malloc(70 * MIB)
    assert allocator.reserved_bytes == (20 + 70) * MIB


def test_no_garbage_is_collected_without_a_limit():
    allocator = allocator_with("garbage_collection_threshold:0.01")
    allocator.free(allocator.malloc(40 * MIB))
    allocator.malloc(60 * MIB)
    assert allocator.reserved_bytes == 100 * MIB


def test_expandable_segments_map_only_the_pages_that_lack():
    allocator = allocator_with("expandable_segments:True")
    first = allocator.malloc(3 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    second = allocator.malloc(18 * MIB)
    assert second.address == first.address + 3 * MIB
    assert allocator.segments == {20 * MIB: 2}
    third = allocator.malloc(50 * MIB)
    assert third.address == first.address + 21 * MIB
    assert allocator.segments == {20 * MIB: 2, 40 * MIB: 1}
    assert allocator.reserved_bytes == 80 * MIB
    small = allocator.malloc(700 * KIB)
    assert allocator.reserved_bytes == 82 * MIB
    assert small.pool.is_small


def test_expandable_blocks_are_split_to_the_last_512_bytes():
    allocator = allocator_with("expandable_segments:True")
    block = allocator.malloc(20 * MIB - 512)
    assert block.next.size == 512
    assert allocator.inactive_split_bytes == 0


def test_only_whole_free_pages_are_unmapped_and_the_gap_is_filled_first():
    allocator = allocator_with("expandable_segments:True")
    blocks = [allocator.malloc(n * MIB) for n in (10, 60, 10)]
    start = blocks[0].address
    allocator.free(blocks[1])
    allocator.empty_cache()
    # Free are 10 to 70 MiB, of which the pages from 20 to 60 MiB are whole.
    assert allocator.reserved_bytes == 40 * MIB
    assert [(b.address - start, b.size) for b in allocator.pools.of(0, is_small=False).free_blocks()] == [
        (10 * MIB, 10 * MIB),
        (60 * MIB, 10 * MIB),
    ]
    again = allocator.malloc(25 * MIB)
    assert again.address == start + 10 * MIB
    assert allocator.reserved_bytes == 60 * MIB


def test_an_empty_expandable_segment_is_given_up():
    allocator = allocator_with("expandable_segments:True")
    allocator.free(allocator.malloc(50 * MIB))
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    assert allocator.pools.of(0, is_small=False).unmapped == []


def test_expandable_segments_are_charged_a_whole_segment_at_the_limit():
    allocator = allocator_with("expandable_segments:True", capacity_bytes=35 * MIB)
    allocator.malloc(19 * MIB)
    # 2 MiB more would map one page of 20 MiB; the check counts 20 MiB as well, on top of 20.
    with pytest.raises(OutOfDeviceMemory):
        allocator.malloc(2 * MIB)


def test_pages_of_expandable_segments_may_exceed_a_fraction_but_not_the_card():
    """As in torch: the fraction is checked against 12 MiB here, and then a page of 20 MiB is mapped."""
    bounded = allocator_with("expandable_segments:True", capacity_bytes=40 * MIB)
    bounded.malloc(3 * MIB, stream=1)
    bounded.malloc(1)
    bounded.malloc(11 * MIB)
    assert bounded.reserved_bytes == 42 * MIB
    card = allocator_with("expandable_segments:True", total_bytes=40 * MIB)
    card.malloc(3 * MIB, stream=1)
    card.malloc(1)
    with pytest.raises(OutOfDeviceMemory):
        card.malloc(11 * MIB)


def test_a_request_beyond_the_address_space_finds_no_memory():
    allocator = allocator_with("expandable_segments:True")
    with pytest.raises(OutOfDeviceMemory):
        allocator.malloc(1 << 60)


def test_best_fit_prefers_the_expandable_block_that_can_grow_least():
    allocator = allocator_with("expandable_segments:True")
    blocks = [allocator.malloc(n * MIB) for n in (30, 5, 25)]
    allocator.free(blocks[0])
    allocator.free(blocks[2])
    # Free are 30 MiB at the start, which cannot grow, and 25 at the end, which would fit better but can.
    assert allocator.reserved_bytes == 60 * MIB
    taken = allocator.malloc(24 * MIB)
    assert taken.address == blocks[0].address


def test_the_driver_is_asked_in_the_order_that_is_logged():
    allocator = allocator_with()
    allocator.driver_log = []
    block = allocator.malloc(12 * MIB)
    address = block.address
    allocator.free(block)
    allocator.empty_cache()
    assert allocator.driver_log == [("segment_alloc", address, 12 * MIB), ("segment_free", address, 12 * MIB)]


def test_new_segments_go_where_they_are_put():
    addresses = iter([64 * MIB, 32 * MIB])
    asked = []

    def place(num_bytes, stream):
        asked.append((num_bytes, stream))
        return next(addresses)

    allocator = CachingAllocator(AllocatorSettings(), place_segment=place)
    assert [allocator.malloc(20 * MIB, stream=2).address for _ in range(2)] == [64 * MIB, 32 * MIB]
    assert asked == [(20 * MIB, 2), (20 * MIB, 2)]


def test_statistics_carry_the_names_of_torch():
    allocator = allocator_with()
    block = allocator.malloc(3 * MIB)
    allocator.malloc(1000)
    allocator.free(block)
    stats = allocator.memory_stats()
    expected = {
        "allocated_bytes.all.current": 1024,
        "allocated_bytes.all.peak": 3 * MIB + 1024,
        "allocated_bytes.all.allocated": 3 * MIB + 1024,
        "allocated_bytes.all.freed": 3 * MIB,
        "requested_bytes.all.current": 1000,
        "requested_bytes.all.peak": 3 * MIB + 1000,
        "reserved_bytes.all.current": 22 * MIB,
        "reserved_bytes.all.peak": 22 * MIB,
        "reserved_bytes.all.freed": 0,
        "inactive_split_bytes.all.current": 2 * MIB - 1024,
        "inactive_split_bytes.all.peak": 19 * MIB - 1024,
        "segment.all.current": 2,
        "allocation.all.current": 1,
        "allocation.all.peak": 2,
        "allocation.all.allocated": 2,
        "active_bytes.all.current": 1024,
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }
    assert {name: stats[name] for name in expected} == expected


def test_peaks_can_be_reset():
    allocator = allocator_with()
    allocator.free(allocator.malloc(40 * MIB))
    allocator.reset_peaks()
    stats = allocator.memory_stats()
    assert stats["allocated_bytes.all.peak"] == stats["active_bytes.all.peak"] == stats["requested_bytes.all.peak"] == 0
    assert stats["reserved_bytes.all.peak"] == 40 * MIB
