"""Sizes of parts that are tried while a run goes on: none that has no room, and then the largest or the fastest."""

from collections.abc import Callable

import pytest

from tightfit.guarding.parts.part_sizes import PartSizes


def run(
    sizes: PartSizes,
    num_examples: int,
    num_elements: int,
    room_bytes: int,
    num_bytes: Callable[[int, int], float],
    seconds: Callable[[int], float] = lambda n: 1.0 + n,
) -> list[int]:
    """The parts of a batch."""
    parts = []
    while (left := num_examples - sum(parts)) > 0:
        size = sizes.choose(left, num_elements=num_elements, room_bytes=room_bytes)
        assert 1 <= size <= left
        held = num_bytes(size, num_elements)
        assert held <= room_bytes, f"{size} examples of {num_elements} have no room"
        sizes.note(size, num_elements=num_elements, num_bytes=int(held), seconds=seconds(size))
        parts.append(size)
    return parts


def test_the_largest_size_that_fits_is_found_and_none_that_does_not_is_tried() -> None:
    sizes = PartSizes()
    for _ in range(8):
        parts = run(sizes, 64, 100, 2_000, lambda n, e: 50 + 0.9 * n * e)
    # 21 would fit, with 5 % to spare 20.
    assert max(parts) >= 18


@pytest.mark.parametrize("growth", [1, 2])
def test_longer_examples_do_not_fail_either(growth: int) -> None:
    sizes = PartSizes()
    for length in (10, 40, 20, 80, 160, 30, 320, 15, 320, 320, 320):
        parts = run(sizes, 32, length, 400_000, lambda n, e: 100 + n * e**growth)
    assert max(parts) == (32 if growth == 1 else 3)


def test_a_faster_smaller_size_is_taken() -> None:
    sizes = PartSizes()
    for _ in range(8):
        parts = run(sizes, 32, 10, 10_000, lambda n, e: n * e, lambda n: n + (n > 8) * 0.5 * n + 1)
    assert parts == [8, 8, 8, 8]


def test_a_size_that_has_failed_is_not_tried_again() -> None:
    sizes = PartSizes()
    assert sizes.choose(8, num_elements=1, room_bytes=None) == 8
    assert sizes.fail(8, num_elements=1)
    assert sizes.choose(8, num_elements=1, room_bytes=None) == 4
    assert sizes.choose(8, num_elements=2, room_bytes=None) == 4
    assert not sizes.fail(1, num_elements=1)


def test_after_calm_a_larger_size_is_tried_again_later_each_time() -> None:
    sizes = PartSizes()
    assert sizes.fail(8, num_elements=1)
    waits = []
    for _ in range(3):
        count = 0
        while sizes.choose(8, num_elements=1, room_bytes=None) == 4:
            sizes.succeed()
            count += 1
        waits.append(count)
        assert sizes.fail(8, num_elements=1)
    assert waits == [100, 200, 400]
