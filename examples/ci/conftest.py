"""A pytest fixture that asserts that a training step fits a GPU. No GPU is needed: `tightfit.estimate` traces the step on a virtual one."""

from collections.abc import Callable
from typing import Any

import pytest

import tightfit


@pytest.fixture
def assert_fits() -> Callable[..., tightfit.Estimate]:
    """`assert_fits(target, device, gib=8, ...)`: the upper bound of the peak is at most `gib` GiB, and what the card has; further arguments
    are those of `tightfit.estimate`. Returns the estimate, for further assertions.
    """

    def check(target: str, device: str, *, gib: float | None = None, **settings: Any) -> tightfit.Estimate:
        found = tightfit.estimate(target, device, **settings)
        limit_bytes = found.capacity_bytes if gib is None else min(found.capacity_bytes, int(gib * 2**30))
        upper_bytes = found.peak.device_high_bytes
        if upper_bytes > limit_bytes:
            # The lines and modules that hold most are what the author of the change needs to see.
            pytest.fail(
                f"{upper_bytes / 2**30:.2f} GiB of {limit_bytes / 2**30:.2f} GiB\n{found.explain()}", pytrace=False
            )
        return found

    return check
