"""An engine under load: what it does with arrivals, and how many of them a second it can take."""

import dataclasses

import numpy as np

from tightfit.serving.load.arrivals import Arrivals
from tightfit.serving.load.load_costs import FEMTOSECONDS, CachePages, LoadCosts
from tightfit.serving.load.load_summary import LoadSummary, ServiceLevel, Times, summary_of
from tightfit.serving.load.scheduler import SchedulerLimits, Served, serve_requests

SHARE_WITHIN = 0.99
"""Of the requests, the share that must be within the service level at the largest rate."""
# The largest rate is found to this factor, among at most so many requests for each trial.
_CLOSE = 1.03
_MOST_REQUESTS = 3_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEngine:
    """An engine that takes requests of at most `max_model_len` tokens."""

    costs: LoadCosts
    pages: CachePages
    limits: SchedulerLimits
    max_model_len: int

    def simulate(self, arrivals: Arrivals, level: ServiceLevel, *, finds_rate: bool = True) -> LoadSummary:
        """What becomes of `arrivals`; with a service level, and `finds_rate`, also the largest rate at which requests like these could come."""
        taken, num_refused, num_cut = self._taken(arrivals)
        found = summary_of(
            taken,
            self._serve(taken),
            capacity=self.pages.capacity,
            level=level,
            num_refused=num_refused,
            num_cut=num_cut,
        )
        if not (finds_rate and level.is_set) or len(taken) < 2:
            return found
        return dataclasses.replace(found, largest_rate=self._largest_rate(taken, level))

    def _taken(self, arrivals: Arrivals) -> tuple[Arrivals, int, int]:
        """The requests that the engine takes, with answers that end where it ends them, and how many it refuses and cuts."""
        is_taken = arrivals.prompts < self.max_model_len
        prompts, answers = arrivals.prompts[is_taken], arrivals.answers[is_taken]
        longest = self.max_model_len - prompts
        kept = Arrivals(seconds=arrivals.seconds[is_taken], prompts=prompts, answers=np.minimum(answers, longest))
        return kept, int((~is_taken).sum()), int((answers > longest).sum())

    def _serve(self, arrivals: Arrivals) -> Served:
        return serve_requests(
            [round(seconds * FEMTOSECONDS) for seconds in arrivals.seconds.tolist()],
            arrivals.prompts.tolist(),
            arrivals.answers.tolist(),
            costs=self.costs,
            pages=self.pages,
            limits=self.limits,
        )

    def _largest_rate(self, arrivals: Arrivals, level: ServiceLevel) -> float:
        """Requests per second of arrivals in the same order and with the same bursts, at which `SHARE_WITHIN` of them are within the service level; 0 if not even one at a time is."""
        some = Arrivals(
            seconds=arrivals.seconds[:_MOST_REQUESTS],
            prompts=arrivals.prompts[:_MOST_REQUESTS],
            answers=arrivals.answers[:_MOST_REQUESTS],
        )
        gaps = some.seconds if some.seconds[-1] else np.arange(len(some), dtype=float)
        unit = (len(some) - 1) / float(gaps[-1])

        def is_good(rate: float) -> bool:
            scaled = dataclasses.replace(some, seconds=gaps * (unit / rate))
            return Times.of(scaled, self._serve(scaled)).within(level) >= SHARE_WITHIN

        low, high = 1e-3, 1.0
        if not is_good(low):
            return 0.0
        while is_good(high) and high < 1e6:
            low, high = high, 2 * high
        while high / low > _CLOSE:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if is_good(middle) else (low, middle)
        return low
