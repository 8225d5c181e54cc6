"""Bounds conditioned on the present level and the present activity: how often the series changes now, and how often a change takes it above a level.

Memory of a process is a step function: it stays where it is until something happens (a request, a model that is loaded), and then goes to one of the levels that
this process has. So for a level u at or above the present value

    P(maximum of the next h samples > u) = 1 - exp(-h r v(u))

with r, the changes per sample of late, and v(u), the share of all changes made at or below u that went above it. The first moves within minutes (a pod falls
idle), the second is the pod's character and learnt over its whole history. Below the present value the next sample has to fall first.
"""

import dataclasses
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from tightfit.forecast.models.abstract_model import AbstractModel
from tightfit.forecast.models.exponential_smoothing import smoothed
from tightfit.forecast.past import Past
from tightfit.forecast.series import Floats

_BURST = 30
"""Samples of a burst or a pause of requests, half an hour of minutes: the half-life of the activity."""
_ACTIVITY_PRIOR = 3.0
"""The activity of the whole history weighs as much as this many samples: however long the pause, the next burst begins unannounced."""
_LEVEL_PRIOR = 1.0
"""Where hardly a change has started below a level, one change that is as good as any other of the history is added."""
_MAX_LEVELS = 1024


@final
class LevelConditioned(AbstractModel):
    """The bound of level q is the lowest value seen so far that is exceeded with a probability of at most 1 - q."""

    name: ClassVar[str] = "level_conditioned"

    def bounds(self, history: Past, levels: Floats) -> Floats:
        """See `AbstractModel`."""
        grid, cells = _grid(history.values)
        is_change = np.concatenate([[False], np.diff(history.values) != 0])
        counts = _Changes(origins=history.origins, cells=cells, changes=np.flatnonzero(is_change), num_cells=len(grid))
        rate = _activity(is_change)[history.origins][:, None]
        above = counts.share_above()
        within = np.exp(-history.horizon * rate * counts.crossings(above))
        # A value below the present one bounds the maximum only if the very next sample falls to it or lower.
        is_below = np.arange(len(grid)) < cells[history.origins][:, None]
        within = np.where(is_below, within * rate * counts.falls(), within)
        # Probabilities of ascending values ascend.
        within = np.maximum.accumulate(within, axis=1)
        highest = np.maximum.accumulate(cells)[history.origins]
        found = np.stack([(within < level).sum(axis=1) for level in levels], axis=1)
        return grid[np.minimum(found, highest[:, None])]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Changes:
    """Counts of the changes up to each origin, for each cell of the grid of values: arrays (origins, cells).

    `cells` (n,) are those of the values; `changes` are the indices of values unlike the one before.
    """

    origins: NDArray[np.int64]
    cells: NDArray[np.int64]
    changes: NDArray[np.int64]
    num_cells: int

    def share_above(self) -> Floats:
        """The share of all changes that ended above a cell, wherever they began."""
        below = self._count(self.cells[self.changes])
        total = below[:, -1:]
        return (total - below) / np.maximum(total, 1.0)

    def crossings(self, above: Floats) -> Floats:
        """The share of changes begun at or below a cell that went above it."""
        before, after = self.cells[self.changes - 1], self.cells[self.changes]
        is_up = after > before
        rose = self._count(before, is_up) - self._count(after, is_up)
        return (rose + _LEVEL_PRIOR * above) / (self._count(before) + _LEVEL_PRIOR)

    def falls(self) -> Floats:
        """The share of changes begun above a cell that ended at or below it: none in a series that only rises."""
        before, after = self.cells[self.changes - 1], self.cells[self.changes]
        is_down = after < before
        ended, begun = self._count(after, is_down), self._count(before)
        total = begun[:, -1:]
        # The change that is added falls as often as any: one that ends below where it began, not below the last of a row of ever higher values.
        prior = _LEVEL_PRIOR * ended / np.maximum(total, 1.0)
        return (ended - self._count(before, is_down) + prior) / (total - begun + _LEVEL_PRIOR)

    def _count(self, cells: NDArray[np.int64], is_counted: NDArray[np.bool_] | None = None) -> Floats:
        rows = np.searchsorted(self.origins, self.changes)
        places = rows * self.num_cells + cells
        shape = len(self.origins), self.num_cells
        counts = np.bincount(places if is_counted is None else places[is_counted], minlength=shape[0] * shape[1])
        return np.cumsum(np.cumsum(counts.reshape(shape), axis=0), axis=1).astype(np.float64)


def _grid(values: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """The values that are told apart, ascending, and the index of each sample's: itself or, of too many, the next higher one."""
    grid, cells = np.unique(values, return_inverse=True)
    if len(grid) <= _MAX_LEVELS:
        return grid, cells
    grid = np.linspace(grid[0], grid[-1], _MAX_LEVELS)
    return grid, np.searchsorted(grid, values)


def _activity(is_change: NDArray[np.bool_]) -> Floats:
    """Changes per sample of late, (n,), shrunk towards those of the whole history up to then."""
    count = np.arange(1, len(is_change) + 1)
    overall = (np.cumsum(is_change) + 0.5) / (count + 1)
    keep = 0.5 ** (1 / _BURST)
    # A mean that starts at zero lacks the weight of what was before the first sample.
    recent = smoothed(np.concatenate([[0.0], is_change]), 1 - keep)[1:] / (1 - keep)
    weight = (1 - keep**count) / (1 - keep)
    return (recent + _ACTIVITY_PRIOR * overall) / (weight + _ACTIVITY_PRIOR)
