"""A row of the benchmark of seconds, and which of two rows takes longer."""

import dataclasses
from collections.abc import Sequence

import numpy as np

_DIFFERENT = 1.10
_MOST_PAIRED = 3000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SecondsRow:
    """A measurement with its predictions; `neusight_seconds` is 0 where there is none, as are the ends of the range of a single
    kernel. `group` says whether it was held out."""

    group: str
    device: str
    name: str
    measured_seconds: float
    predicted_seconds: float
    roofline_seconds: float
    neusight_seconds: float = 0.0
    low_seconds: float = 0.0
    high_seconds: float = 0.0

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_seconds / self.measured_seconds - 1

    @property
    def is_in_range(self) -> bool:
        """Whether the measurement is within the predicted range."""
        return self.low_seconds <= self.measured_seconds <= self.high_seconds


def ordered_right(rows: Sequence[SecondsRow]) -> float:
    """The share of pairs on one card, of measured times more than a tenth apart, whose predictions are in the same order; NaN where there is no pair."""
    right = total = 0
    for device in {row.device for row in rows}:
        own = [row for row in rows if row.device == device][:_MOST_PAIRED]
        measured, predicted = (
            np.array([getattr(row, name) for row in own]) for name in ("measured_seconds", "predicted_seconds")
        )
        longer = measured[:, None] > _DIFFERENT * measured[None, :]
        total += int(longer.sum())
        right += int((longer & (predicted[:, None] > predicted[None, :])).sum())
    return right / total if total else float("nan")
