"""What a simulated load was like for those who waited: percentiles of the times to the first token and per token, and how many requests were within limits."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from tightfit.serving.load.arrivals import Arrivals
from tightfit.serving.load.load_costs import FEMTOSECONDS
from tightfit.serving.load.scheduler import Served
from tightfit.tape import Column

_PERCENTS = (50, 90, 99)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLevel:
    """The most seconds that a request may take to its first token, and per further token; None: no limit."""

    first_token: float | None = None
    each_token: float | None = None

    @property
    def is_set(self) -> bool:
        """Whether there is a limit."""
        return self.first_token is not None or self.each_token is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Seconds that half, nine tenths and 99 % of the requests took at most, and their mean."""

    p50: float
    p90: float
    p99: float
    mean: float

    @classmethod
    def of(cls, seconds: Column) -> Self:
        """Of the seconds of each request; 0 without any."""
        if not len(seconds):
            return cls(p50=0.0, p90=0.0, p99=0.0, mean=0.0)
        p50, p90, p99 = np.percentile(seconds, _PERCENTS).tolist()
        return cls(p50=p50, p90=p90, p99=p99, mean=float(seconds.mean()))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadSummary:
    """A simulated load. `num_refused` requests were longer than the engine takes, and `num_cut` answers ended where it ends them.

    `each_token` is the time per token after the first, of requests with more than one. Tokens per second are over the time from the first arrival to the last end. `share_within` is the share
    of all requests within the service level, refused ones are not, None without one; `largest_rate` that of arrivals at which 99 % would be, however long they come, 0 if there is none, None if it was not looked for.
    """

    num_requests: int
    num_refused: int
    num_cut: int
    rate: float
    seconds: float
    first_token: Percentiles
    each_token: Percentiles
    whole: Percentiles
    num_preemptions: int
    num_preempted: int
    num_steps: int
    mean_requests: float
    most_requests: int
    most_cache: float
    answer_tokens_per_second: float
    prompt_tokens_per_second: float
    share_within: float | None
    largest_rate: float | None = None

    @property
    def share_served(self) -> float:
        """The share of the requests that were not refused."""
        return 1 - self.num_refused / max(1, self.num_requests)

    @property
    def goodput(self) -> float | None:
        """Requests per second within the service level."""
        if self.share_within is None or not self.seconds:
            return None
        return self.share_within * self.num_requests / self.seconds

    def to_json(self) -> Mapping[str, Any]:
        """Plain data."""
        return {**dataclasses.asdict(self), "goodput": self.goodput}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of each request to its first token, per token after it (0 where there is none), and to its end."""

    first_token: Column
    each_token: Column
    whole: Column

    @classmethod
    def of(cls, arrivals: Arrivals, served: Served) -> Self:
        """Of the requests that were served."""
        first, end = (np.array(times, dtype=float) / FEMTOSECONDS for times in (served.first, served.end))
        further = arrivals.answers - 1
        each = np.divide(end - first, further, out=np.zeros(len(end)), where=further > 0)
        return cls(first_token=first - arrivals.seconds, each_token=each, whole=end - arrivals.seconds)

    def within(self, level: ServiceLevel, num_refused: int) -> float:
        """The share of all requests that are within the service level, in which those that were refused are not."""
        good = np.ones(len(self.whole), dtype=bool)
        if level.first_token is not None:
            good &= self.first_token <= level.first_token
        if level.each_token is not None:
            good &= self.each_token <= level.each_token
        return float(good.sum()) / max(1, len(good) + num_refused)


def summary_of(
    arrivals: Arrivals, served: Served, *, capacity: int, level: ServiceLevel, num_refused: int, num_cut: int
) -> LoadSummary:
    """The summary of `arrivals` that were served with `capacity` bytes of cache."""
    times = Times.of(arrivals, served)
    seconds = max(served.end, default=0) / FEMTOSECONDS
    preemptions = np.array(served.preemptions, dtype=np.int64)
    return LoadSummary(
        num_requests=len(arrivals) + num_refused,
        num_refused=num_refused,
        num_cut=num_cut,
        rate=arrivals.rate,
        seconds=seconds,
        first_token=Percentiles.of(times.first_token),
        each_token=Percentiles.of(times.each_token[arrivals.answers > 1]),
        whole=Percentiles.of(times.whole),
        num_preemptions=int(preemptions.sum()),
        num_preempted=int((preemptions > 0).sum()),
        num_steps=served.num_steps,
        mean_requests=served.running_time / FEMTOSECONDS / seconds if seconds else 0.0,
        most_requests=served.most_requests,
        most_cache=served.most_bytes / capacity if capacity else 0.0,
        answer_tokens_per_second=float(arrivals.answers.sum()) / seconds if seconds else 0.0,
        prompt_tokens_per_second=float(arrivals.prompts.sum()) / seconds if seconds else 0.0,
        share_within=times.within(level, num_refused) if level.is_set else None,
    )
