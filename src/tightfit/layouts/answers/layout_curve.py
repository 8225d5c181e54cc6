"""The fastest layouts over several numbers of cards: where the curve of speed and cost bends, and how few are enough."""

import dataclasses
from collections.abc import Callable
from typing import Any

from tightfit.layouts.answers.layout_plan import SCHEMA, LayoutPlan

# Seconds are not known any better.
_AS_CHEAP = 0.01


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayoutCurve:
    """Plans by rising numbers of cards, of one program and one number of examples in a step."""

    points: tuple[LayoutPlan, ...]

    @property
    def fitting(self) -> tuple[LayoutPlan, ...]:
        """The points at which a layout fits."""
        return tuple(point for point in self.points if point.fits)

    @property
    def fewest(self) -> LayoutPlan | None:
        """The point with the fewest cards at which a layout fits."""
        return next(iter(self.fitting), None)

    @property
    def fewest_in_time(self) -> LayoutPlan | None:
        """The point with the fewest cards at which the whole training is done before its deadline; without one that at which it fits."""
        return self._first(lambda point: point.cost is None or point.cost.meets_deadline)

    @property
    def cheapest(self) -> LayoutPlan | None:
        """The point with the fewest cards at which a token (or an example) costs least, or next to it; None where nothing has a price."""
        rates = [(point.cost.per_price, point) for point in self.fitting if point.cost and point.cost.per_price]
        most = max((rate for rate, _ in rates), default=0.0)
        return next((point for rate, point in rates if rate >= (1 - _AS_CHEAP) * most), None)

    @property
    def is_met(self) -> bool:
        """Whether a layout fits, and is in time where there is a deadline."""
        return self.fewest_in_time is not None

    def to_json(self) -> dict[str, Any]:
        """The object that `tightfit plan --gpus 8..512 --json` prints, without `target` and `elapsed_seconds`."""
        return {
            "schema": SCHEMA,
            "points": [point.to_json() for point in self.points],
            "fewest_gpus": self.fewest.num_gpus if self.fewest else None,
            "fewest_gpus_in_time": self.fewest_in_time.num_gpus if self.fewest_in_time else None,
            "cheapest_gpus": self.cheapest.num_gpus if self.cheapest else None,
        }

    def _first(self, holds: Callable[[LayoutPlan], bool]) -> LayoutPlan | None:
        return next((point for point in self.fitting if holds(point)), None)
