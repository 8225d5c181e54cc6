"""Parameters of tests of which a part is always tried, and the rest only where tests that are marked as slow are run; or each part with some commits."""

import collections
import zlib
from collections.abc import Iterable, Sequence

import pytest


def every_second(values: Iterable[object]) -> list[object]:
    """The values as parameters; the second of each two is marked as slow."""
    return [pytest.param(value, marks=pytest.mark.slow if number % 2 else ()) for number, value in enumerate(values)]


def in_turn(items: Sequence[pytest.Item], commit: str | None) -> list[pytest.Item]:
    """The items without those that have their turn with other commits: of the parameters of a test that is marked `by_turns(n)` each n-th is left,
    and which ones is drawn by the hash of the commit and the test's name. A test without parameters is left with each n-th hash. All without a commit.

    Two runs of a commit try the same, and after ten commits each of two parts has been tried with 99.9 %.
    """
    if not commit:
        return list(items)
    turn, numbers, left = int(commit, 16), collections.Counter[str](), []
    for item in items:
        marker = item.get_closest_marker("by_turns")
        if marker is not None:
            test = item.nodeid.partition("[")[0]
            numbers[test] += 1
            if (numbers[test] + zlib.crc32(test.encode()) + turn) % marker.args[0]:
                continue
        left.append(item)
    return left
