"""The search for the largest batch size: its result as plain data, and a root finding in few traces."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

SCHEMA = 1
# The line through small sizes is flat, as weights dominate there, and would jump to a size whose trace takes minutes.
_LARGEST_STEP = 8
_BEST_PER_SAMPLE = 1.01
CLOSE_ENOUGH = 0.02
"""The largest size that fits is closed in to within this share of the smallest that does not."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """One traced batch size: its device peak, whether that fits, its time per step, and its techniques."""

    size: int
    device_bytes: int
    device_high_bytes: int
    fits: bool
    seconds_per_step: float
    techniques: tuple[str, ...]
    exact: bool

    @property
    def seconds_per_sample(self) -> float:
        """Seconds per step divided by the batch size."""
        return self.seconds_per_step / self.size

    def to_json(self) -> dict[str, Any]:
        """All fields, and the seconds per sample."""
        return dataclasses.asdict(self) | {"seconds_per_sample": self.seconds_per_sample}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """The largest size that fits without techniques (`plain`) and with a plan (`planned`, None where no larger one was found), each with the
    smallest size that was found not to fit, and the one of all that is `fastest` per sample. `failed` maps sizes that the workload does not run with to the reason.
    `num_examples` are those of the data set, where that is known: larger sizes are not tried. `is_interrupted`: the search was ended before its time."""

    target: str
    device: str
    parameter: str
    budget_bytes: int
    plain: BatchSize | None
    plain_too_large: int | None
    planned: BatchSize | None
    planned_too_large: int | None
    fastest: BatchSize | None
    tried: tuple[BatchSize, ...]
    failed: Mapping[int, str] = dataclasses.field(default_factory=dict)
    num_examples: int | None = None
    is_interrupted: bool = False

    @property
    def fits(self) -> bool:
        """Whether any size does."""
        return self.fastest is not None

    def to_json(self) -> dict[str, Any]:
        """The object that `tightfit plan --search NAME --json` prints, without `elapsed_seconds`."""
        rows = {
            name: None if row is None else row.to_json()
            for name, row in (("plain", self.plain), ("planned", self.planned), ("fastest", self.fastest))
        }
        return {
            "schema": SCHEMA,
            "target": self.target,
            "device": self.device,
            "parameter": self.parameter,
            "budget_bytes": self.budget_bytes,
            "fits": self.fits,
            **rows,
            "plain_too_large": self.plain_too_large,
            "planned_too_large": self.planned_too_large,
            "tried": [row.to_json() for row in self.tried],
            "failed": [{"size": size, "why": why} for size, why in sorted(self.failed.items())],
            "num_examples": self.num_examples,
            "is_interrupted": self.is_interrupted,
        }


def close_in(
    first: int,
    excess: Callable[[int], int | None],
    *,
    known: int = 0,
    max_tries: int,
    close_enough: float,
    largest: Callable[[], int | None] = lambda: None,
    needs_end: bool = True,
) -> tuple[int, int | None]:
    """The largest size that was found to fit (`known` if none larger was), and the smallest that was found not to (None: none was).

    `excess(size)` is the bytes by which a run exceeds its budget, at most 0 where it fits, and None where it does not run at all. It is
    interpolated linearly between the two ends; without two of them, sizes are doubled or halved. Sizes above `largest()`, which is asked before
    each try, are not tried; None: there is no such limit that is known. Without `needs_end` a size that is `close_enough` to one that fits is not
    tried either, only to find that it does not fit. Sizes are multiples of the largest power of two that divides `first` and is that close: a program that
    needs even batches runs with them, and kernels are as fast as with the size that it has. `max_tries` are counted anew from the first size that does not fit, where an end is needed: how far
    away it is says nothing about how close the answer comes.
    """
    low, high = known, None
    values: dict[int, int] = {}
    size, num_alike = first, 0
    # Far from the first size the way up takes longer.
    num_left = max_tries * 3 // 2 if needs_end else max_tries
    while num_left > 0:
        num_left -= 1
        most = largest()
        size = size if most is None else min(size, most)
        if size <= low or size in values:
            break
        # Each call is a trace, or a whole plan, of several seconds.
        value = excess(size)
        if value is not None:
            values[size] = value
        # A size that does not run (a batch norm with one example) counts as too large.
        fits = value is not None and value <= 0
        is_above = high is not None
        if fits:
            num_alike = num_alike + 1 if size > low and is_above else 0
            low = max(low, size)
        else:
            num_alike = num_alike + 1 if is_above else 0
            num_left = num_left if is_above or not needs_end else max_tries
            high = size if high is None else min(high, size)
        if high is not None and high - low <= max(1, close_enough * high):
            break
        step = max(1, int(close_enough * low))
        size = _rounded(_next(values, low, high, step << num_alike), low, high, first=first, close_enough=close_enough)
        if high is None and not needs_end and size <= low + step:
            break
    return low, high


def _rounded(size: int, low: int, high: int | None, *, first: int, close_enough: float) -> int:
    """`size` as a multiple of the largest power of two that divides `first` and is at most `close_enough` of it, where one lies between the ends."""
    multiple = math.gcd(first, 1 << max(0, int(close_enough * size).bit_length() - 1))
    below = size // multiple * multiple
    between = (near for near in (below, below + multiple) if low < near and (high is None or near < high))
    return next(between, size)


def _next(values: Mapping[int, int], low: int, high: int | None, step: int) -> int:
    """Where the line through two tried sizes crosses the budget, at least `step` from both ends; at least `step` up without an upper end."""
    # The two ends, or the two nearest to the budget: memory is nearly linear in the batch only locally, because segments come in steps.
    ends = [low, high] if high is not None and low in values and high in values else []
    nearest = ends or sorted(values, key=lambda size: abs(values[size]))[:2]
    if len(nearest) == 2 and values[nearest[0]] != values[nearest[1]]:
        slope = (values[nearest[1]] - values[nearest[0]]) / (nearest[1] - nearest[0])
        # Activations grow linearly with the batch; a slope of 0 or less is the allocator's rounding of segments, beside which they do not count yet.
        guess = int(nearest[0] - values[nearest[0]] / slope) if slope > 0 else _LARGEST_STEP * low
    elif len(nearest) == 2 and high is None:
        guess = _LARGEST_STEP * low
    else:
        guess = 2 * low if high is None else (low + high) // 2
    # A line comes to the answer from below only and never shows an upper end, so a step is at least `step`.
    if high is None:
        return min(max(guess, low + step), _LARGEST_STEP * max(1, low))
    # A line that leads to where nothing runs, or out of the ends, says nothing.
    if not low < guess < high and not ends:
        guess = (low + high) // 2
    step = max(1, min(step, (high - low) // 2))
    return min(max(guess, low + step), high - step)


def fastest(rows: Iterable[BatchSize]) -> BatchSize | None:
    """The size with the least seconds per sample of those that fit; the smallest of those within 1 % of it."""
    fitting = [row for row in rows if row.fits]
    if not fitting:
        return None
    least = min(row.seconds_per_sample for row in fitting)
    return min((r for r in fitting if r.seconds_per_sample <= _BEST_PER_SAMPLE * least), key=lambda r: r.size)
