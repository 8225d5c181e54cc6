"""torch's allocator of pinned host memory: powers of two, which are kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightfit.allocator.pinned_host import PinnedHostAllocator, rounded

MIB = 1 << 20


@pytest.mark.parametrize(
    ("num_bytes", "block"),
    [(0, 0), (1, 1), (2, 2), (3, 4), (5 * MIB, 8 * MIB), (8 * MIB, 8 * MIB), (8 * MIB + 1, 16 * MIB)],
)
def test_a_request_takes_the_next_power_of_two(num_bytes: int, block: int) -> None:
    assert rounded(num_bytes) == block


def test_what_is_freed_is_kept_for_requests_of_its_power_alone() -> None:
    pinned = PinnedHostAllocator()
    pinned.malloc(5 * MIB)
    pinned.free(5 * MIB)
    pinned.malloc(7 * MIB)
    assert (pinned.reserved_bytes, pinned.requested_bytes) == (8 * MIB, 7 * MIB)
    pinned.free(7 * MIB)
    # Half of what is there would do, and a new block is made.
    pinned.malloc(4 * MIB)
    assert (pinned.reserved_bytes, pinned.peak_requested_bytes) == (12 * MIB, 7 * MIB)
    pinned.empty_cache()
    assert (pinned.reserved_bytes, pinned.peak_reserved_bytes) == (4 * MIB, 12 * MIB)


@given(st.lists(st.integers(0, 100), max_size=20))
def test_a_second_round_of_the_same_requests_needs_nothing_new(sizes: list[int]) -> None:
    pinned = PinnedHostAllocator()
    for _ in range(2):
        for size in sizes:
            pinned.malloc(size)
        assert pinned.reserved_bytes == sum(map(rounded, sizes)) == pinned.peak_reserved_bytes
        assert pinned.requested_bytes == sum(sizes)
        for size in sizes:
            pinned.free(size)
        assert pinned.requested_bytes == 0
