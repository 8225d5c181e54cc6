"""The verdict about an estimate and the time step of its peak, in words that are the same in a terminal, a notebook and `explain`."""

from collections.abc import Mapping
from typing import Any

from tightfit.simulate.estimate import Estimate, needed_bytes, verdict_of
from tightfit.simulate.peak import Peak
from tightfit.tape import Coverage
from tightfit.units import format_bytes

_UNNAMED_PHASE = "other"


def verdict_words(estimate: Estimate) -> tuple[str, str]:
    """The verdict in a word or two, and the bytes left or missing."""
    return _words(estimate.peak, estimate.capacity_bytes, estimate.margin, estimate.coverage)


def verdict_of_answer(answer: Mapping[str, Any]) -> tuple[str, str]:
    """The same of the object that `tightfit estimate --json` prints."""
    coverage = Coverage.from_json(answer["coverage"])
    return _words(Peak(**answer["peak"]), answer["device"]["capacity_bytes"], answer["margin"], coverage)


def named_phase(phase: str) -> str:
    """The phase of the peak's time step; empty outside of the forward pass, the backward pass and the optimizer, where it says nothing."""
    return "" if phase == _UNNAMED_PHASE else phase


def _words(peak: Peak, capacity_bytes: int, margin: str, coverage: Coverage) -> tuple[str, str]:
    word = verdict_of(peak, capacity_bytes, margin, is_whole=coverage.is_whole)
    left = capacity_bytes - peak.device_bytes
    if peak.device_high_bytes <= capacity_bytes:
        return word, f"{format_bytes(left)} left"
    # The likely peak fits and the upper end of its range does not: it depends on workspaces and the allocation order.
    if left >= 0:
        higher = format_bytes(peak.device_high_bytes - peak.device_bytes)
        return word, f"{format_bytes(left)} left, and the peak may be {higher} higher"
    fits = needed_bytes(peak, margin) <= capacity_bytes
    return word, f"{format_bytes(-left)} too much{' if the likely peak is reached' if fits else ''}"
