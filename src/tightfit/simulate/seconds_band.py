"""The range of a step's seconds, from what is known of the errors of its kernels (`tightfit.cost.doubts`).

Errors of one kind of work go together, those of different kinds do not: each kind is made slower and faster by its doubt, the timeline is run again, and the differences are
added as squares. So a step that waits for its host has the doubt of the host, and copies that are hidden add none. Kernels of equal size share their own error:
of a kind with many sizes, these cancel in part.

Two plans for one program on one card share most errors: the doubt of the ratio of their seconds is that of their differences (`ratio_doubt`).
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from tightfit.cost.doubts import MACHINE, WORDS, ErrorKind, doubt_of, error_kinds
from tightfit.cost.roofline import arithmetic_of_operators
from tightfit.cost.steps import step_operators
from tightfit.devices.calibration import Calibration
from tightfit.devices.device import Device
from tightfit.simulate.step_work import PricedTape
from tightfit.simulate.timeline import seconds_of_step
from tightfit.tape import Column

# Work of a smaller share of a step cannot move its range visibly.
_SMALLEST_SHARE = 0.003
# Kernels of two plans for one program are not all alike: other micro-batches have other sizes, other optimizers other kernels.
_LEAST_RATIO_DOUBT = 0.01


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SecondsBand:
    """The range that holds the seconds of a step in 90 % of cases. `more` and `less` are logarithms of the factors by which each kind of work alone makes the
    step longer and shorter, by its name."""

    low_seconds: float
    high_seconds: float
    more: Mapping[str, float]
    less: Mapping[str, float]

    def largest_causes(self, num_causes: int) -> list[str]:
        """The kinds of work that widen the range most, the widest first; those below a quarter of the widest are not worth a word."""
        widths = {name: more + self.less[name] for name, more in self.more.items()}
        ordered = sorted(widths, key=lambda name: -widths[name])
        return [name for name in ordered[:num_causes] if widths[name] > widths[ordered[0]] / 4]


def seconds_band(
    prices: PricedTape, device: Device, calibration: Calibration | None = None, *, tf32_convolution: bool | None = None
) -> SecondsBand:
    """The range of the last step of `prices`, whose seconds are on `device`; (0, 0) for a tape without steps."""
    steps = step_operators(prices.tape)
    if not steps:
        return SecondsBand(low_seconds=0.0, high_seconds=0.0, more={}, less={})
    likely = seconds_of_step(prices)
    if not likely:
        return SecondsBand(low_seconds=0.0, high_seconds=0.0, more={}, less={})
    arithmetic = arithmetic_of_operators(prices.tape, tf32_convolution=tf32_convolution)
    kinds = error_kinds(prices.tape, arithmetic, device)
    more: dict[str, float] = {}
    less: dict[str, float] = {}
    for kind in ErrorKind:
        doubt = _doubt_in_step(kind, kinds, prices, steps[-1], device, calibration)
        if doubt:
            more[WORDS[kind]] = math.log(seconds_of_step(_scaled(prices, kinds == kind, kind, doubt)) / likely)
            less[WORDS[kind]] = -math.log(seconds_of_step(_scaled(prices, kinds == kind, kind, -doubt)) / likely)
    return SecondsBand(
        low_seconds=likely * math.exp(-_total(less)), high_seconds=likely * math.exp(_total(more)), more=more, less=less
    )


def ratio_doubt(one: SecondsBand, other: SecondsBand) -> float:
    """How far the logarithm of the ratio of the seconds of two plans for one program on one card may be off (90 %).

    What makes all kernels of a kind slower makes both plans slower: only as far as one has more of it does it move the ratio, and the machine's errors cancel.
    """
    names = {*one.more, *other.more}
    apart = [
        max(
            abs(one.more.get(name, 0.0) - other.more.get(name, 0.0)),
            abs(one.less.get(name, 0.0) - other.less.get(name, 0.0)),
        )
        for name in names
    ]
    return math.hypot(_LEAST_RATIO_DOUBT, *apart)


def _total(parts: Mapping[str, float]) -> float:
    return math.hypot(MACHINE, *parts.values())


def _doubt_in_step(
    kind: ErrorKind,
    kinds: Column,
    prices: PricedTape,
    step: tuple[int, int],
    device: Device,
    calibration: Calibration | None,
) -> float:
    """The half-width of all work of `kind` in a step together; 0 where it has next to none."""
    shared, own = doubt_of(kind, device, calibration)
    if kind is ErrorKind.HOST:
        return shared
    begin, end = step
    chosen = np.flatnonzero(kinds[begin:end] == kind) + begin
    seconds = prices.seconds[chosen]
    if seconds.sum() <= _SMALLEST_SHARE * prices.seconds[begin:end].sum():
        return 0.0
    return math.hypot(shared, own * math.sqrt(_concentration(prices, chosen, seconds)))


def _concentration(prices: PricedTape, chosen: Column, seconds: Column) -> float:
    """The sum of the squared shares of each size in the seconds of the operators `chosen`: 1 where all have one size, little where they have many."""
    # Equal sizes have equal seconds, and different ones hardly ever to the last digit.
    _, place = np.unique(seconds, return_inverse=True)
    shares = np.bincount(place, seconds) / seconds.sum()
    return float((shares**2).sum())


def _scaled(prices: PricedTape, chosen: Column, kind: ErrorKind, doubt: float) -> PricedTape:
    factor = math.exp(doubt)
    if kind is ErrorKind.HOST:
        return dataclasses.replace(
            prices,
            issue_seconds=prices.issue_seconds * factor,
            read_seconds=prices.read_seconds * factor,
            update_seconds_per_byte=prices.update_seconds_per_byte * factor,
            python_factor=prices.python_factor * factor,
        )
    return dataclasses.replace(prices, seconds=np.where(chosen, factor * prices.seconds, prices.seconds))
