"""Parameters of tests of which a part is always tried, and the rest only where tests that are marked as slow are run."""

from collections.abc import Iterable

import pytest


def every_second(values: Iterable[object]) -> list[object]:
    """The values as parameters; the second of each two is marked as slow."""
    return [pytest.param(value, marks=pytest.mark.slow if number % 2 else ()) for number, value in enumerate(values)]
