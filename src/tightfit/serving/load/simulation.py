"""An engine under load: what it does with arrivals, and how many of them a second it can take."""

import dataclasses

import numpy as np

from tightfit.serving.load.arrivals import Arrivals
from tightfit.serving.load.load_costs import FEMTOSECONDS, CachePages, LoadCosts
from tightfit.serving.load.load_summary import LoadSummary, ServiceLevel, Times, summary_of
from tightfit.serving.load.scheduler import SchedulerLimits, Served, serve_requests

SHARE_WITHIN = 0.99
"""Of the requests, the share that must be within the service level at the largest rate."""
# The largest rate is found to this factor, among so many requests for each trial, and so many for each that is in a batch.
_CLOSE = 1.03
_LEAST_REQUESTS, _MOST_REQUESTS = 2_000, 3_000
_REQUESTS_PER_PLACE = 8
# Requests per second with which the search begins: each is alone.
_SLOWEST = 1e-3


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
        found = dataclasses.replace(found, rate=arrivals.rate)
        if not (finds_rate and level.is_set) or len(arrivals) < 2:
            return found
        return dataclasses.replace(found, largest_rate=self._largest_rate(arrivals, level))

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
        """Requests per second of arrivals in the same order and with the same bursts, again and again, at which `SHARE_WITHIN` of them are within the service level; 0 if not even
        one at a time is. At most what the engine serves where requests never run out: above that rate a queue that is there once does not end."""
        period, unit = self._repeated(arrivals)

        def is_good(rate: float) -> bool:
            scaled = dataclasses.replace(period, seconds=period.seconds * (unit / rate))
            taken, num_refused, _ = self._taken(scaled)
            return Times.of(taken, self._serve(taken)).within(level, num_refused) >= SHARE_WITHIN

        low, high = _SLOWEST, max(_SLOWEST, self._saturated_rate(period))
        if not is_good(low):
            return 0.0
        if is_good(high):
            return high
        while high / low > _CLOSE:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if is_good(middle) else (low, middle)
        return low

    def _saturated_rate(self, arrivals: Arrivals) -> float:
        """How many of them, those that are refused too, are served a second where all are there from the beginning."""
        taken, _, _ = self._taken(dataclasses.replace(arrivals, seconds=np.zeros(len(arrivals))))
        if not len(taken):
            return 0.0
        served = self._serve(taken)
        # Until the last one begins no place is free. Those that run then have half of their tokens, by and large.
        begun = max(served.first)
        running = sum(end > begun for end in served.end)
        return (len(taken) - running / 2) / len(taken) * len(arrivals) / (begun / FEMTOSECONDS)

    def _repeated(self, arrivals: Arrivals) -> tuple[Arrivals, float]:
        """The first of the arrivals again and again, and their rate: a queue that grows has the time to be seen, and all places of a batch are taken."""
        number = min(len(arrivals), _MOST_REQUESTS)
        seconds = arrivals.seconds[:number]
        gaps = seconds if seconds[-1] else np.arange(number, dtype=float)
        mean = float(gaps[-1]) / (number - 1)
        least = max(_LEAST_REQUESTS, _REQUESTS_PER_PLACE * self.limits.max_requests)
        times = -(-least // number)
        again = np.concatenate([gaps + turn * (gaps[-1] + mean) for turn in range(times)])
        prompts, answers = (np.tile(each[:number], times) for each in (arrivals.prompts, arrivals.answers))
        return Arrivals(seconds=again, prompts=prompts, answers=answers), 1 / mean
