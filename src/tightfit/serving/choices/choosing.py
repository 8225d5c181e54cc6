"""The choice of a server: by throughput, latency, cost or memory, within limits of time, and under a load where there is one.

Each kind of server (card, degree, formats) is represented by its best batch. Where requests arrive, those are taken in the order of their worth and simulated until enough are
found that keep the limits.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Literal

from tightfit.serving.choices.candidate_servers import Kind
from tightfit.serving.costs.serving_speed import ServingSpeed
from tightfit.serving.costs.step_costs import StepCosts
from tightfit.serving.load.arrivals import Arrivals
from tightfit.serving.load.load_summary import LoadSummary, ServiceLevel
from tightfit.serving.load.simulation import SHARE_WITHIN
from tightfit.serving.serving_estimate import ServingEstimate
from tightfit.serving.traced_server import AskedLoad, Server
from tightfit.units import format_seconds

Objective = Literal["throughput", "latency", "cost", "memory"]
OBJECTIVES: tuple[Objective, ...] = ("throughput", "latency", "cost", "memory")
# The share of a card is rounded up to this.
_SHARE_STEPS = 1000
_MOST_ALTERNATIVES = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A server that keeps the limits, with what it does: `replicas` of it on the cards that there are."""

    kind: Kind
    server: Server
    estimate: ServingEstimate
    speed: ServingSpeed
    alone: ServingSpeed
    load: LoadSummary | None = None

    @property
    def tokens_per_second(self) -> float:
        """Tokens of answers of all replicas together, the middle of the range."""
        return sum(self.speed.tokens_per_second) / 2 * self.kind.replicas

    @property
    def seconds_alone(self) -> float:
        """Seconds of a whole request that nobody disturbs."""
        return self.alone.first_token.middle + max(0, self.alone.answer_tokens - 1) * self.alone.each_token.middle

    @property
    def cost_of_a_million(self) -> float | None:
        """What a million tokens of answers cost; None where no price is known."""
        price = self.kind.card.price_per_hour
        if price is None:
            return None
        return price * self.kind.degree * self.kind.replicas / 3600 / self.tokens_per_second * 1e6

    @property
    def used_bytes(self) -> float:
        """Bytes of all cards of one server that the engine takes."""
        return self.estimate.capacity_bytes * self.server.settings.gpu_memory_utilization * self.kind.degree

    def worth(self, objective: Objective) -> tuple[float, ...]:
        """What is to be as small as possible; among equals fewer cards, and no change of formats."""
        cost = self.cost_of_a_million
        first = {
            "throughput": -self.tokens_per_second,
            "latency": self.seconds_alone,
            "cost": math.inf if cost is None else cost,
            "memory": self.used_bytes,
        }[objective]
        changes = (self.kind.weight_format is not None) + (self.kind.kv_dtype != "auto")
        return first, self.kind.degree, changes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the server is for: requests of these lengths, `at_once` of them, within `level`, and `load` if they arrive."""

    objective: Objective
    lengths: Sequence[tuple[int, int]]
    at_once: int
    level: ServiceLevel
    load: AskedLoad | None


def best_of_kind(kind: Kind, tried: Iterator[Server], wanted: Wanted) -> Offer | str:
    """The best server of a kind, or why none of them will do."""
    best: Offer | None = None
    why = ""
    costs: StepCosts | None = None
    for server in tried:
        found = _with_least_share(server, wanted) if wanted.objective == "memory" else server.start_up(wanted.lengths)
        if isinstance(found, str) or not found.fits:
            why = why or (found if isinstance(found, str) else found.why)
            continue
        costs = costs or server.costs()
        offer = _offer(kind, dataclasses.replace(server, settings=found.settings), found, costs, wanted)
        late = _too_late(offer.speed, wanted.level)
        if late:
            why = late
        elif best is None or offer.worth(wanted.objective) < best.worth(wanted.objective):
            best = offer
    return best if best is not None else why or "no settings of the engine are possible"


def ranked(offers: Sequence[Offer], wanted: Wanted) -> tuple[list[Offer], list[tuple[Kind, str]]]:
    """The best offers in order, and those that do not keep the limits under the load."""
    ordered = sorted(offers, key=lambda offer: offer.worth(wanted.objective))
    if wanted.load is None:
        return ordered[: _MOST_ALTERNATIVES + 1], []
    kept, refused = [], []
    for offer in ordered:
        load = _under_load(offer, wanted.load)
        share = load.share_served if load.share_within is None else load.share_within
        if share >= SHARE_WITHIN:
            kept.append(dataclasses.replace(offer, load=load))
        else:
            refused.append((offer.kind, _missed(load)))
        if len(kept) > _MOST_ALTERNATIVES:
            break
    return kept, refused


def _missed(load: LoadSummary) -> str:
    """Why a load is too much for a server."""
    refused = f"{load.num_refused:,} of {load.num_requests:,} requests are refused as too long"
    if load.share_within is None:
        return refused
    also = f"; {refused}" if load.num_refused else ""
    return f"under the load {load.share_within:.0%} of the requests are within the limits{also}"


def _offer(kind: Kind, server: Server, found: ServingEstimate, costs: StepCosts, wanted: Wanted) -> Offer:
    room = found.max_concurrency if found.concurrency_at_lengths is None else found.concurrency_at_lengths
    return Offer(
        kind=kind,
        server=server,
        estimate=found,
        speed=server.speed(costs, wanted.lengths, room),
        alone=server.speed(costs, wanted.lengths, 1.0),
    )


def _too_late(speed: ServingSpeed, level: ServiceLevel) -> str:
    for name, seconds, limit in (
        ("the first token", speed.first_token.middle, level.first_token),
        ("each further token", speed.each_token.middle, level.each_token),
    ):
        if limit is not None and seconds > limit:
            return f"{name} takes {format_seconds(seconds)}, and {format_seconds(limit)} are allowed"
    return ""


def _with_least_share(server: Server, wanted: Wanted) -> ServingEstimate | str:
    """The server with the smallest share of its cards that holds the longest request, and `at_once` of the lengths; or why there is none."""
    all_of_it = dataclasses.replace(server.settings, gpu_memory_utilization=1.0)
    found = dataclasses.replace(server, settings=all_of_it).start_up(wanted.lengths)
    longest = server.cache.request_bytes(server.settings.max_model_len)
    needed = max(longest, wanted.at_once * found.request_bytes)
    # The cache may be more than is left even of the whole card, which an estimate does not say: the parts do.
    others = found.charged_bytes
    share = math.ceil((others + needed) / found.capacity_bytes * _SHARE_STEPS) / _SHARE_STEPS
    if share > 1:
        return f"{share:.2f} of the card would be needed"
    settings = dataclasses.replace(server.settings, gpu_memory_utilization=share)
    return dataclasses.replace(server, settings=settings).start_up(wanted.lengths)


def _under_load(offer: Offer, load: AskedLoad) -> LoadSummary:
    """What becomes of the requests that one of the replicas gets, which take turns."""
    number = offer.kind.replicas
    arrivals = load.arrivals
    share = Arrivals(
        seconds=arrivals.seconds[::number] - arrivals.seconds[0],
        prompts=arrivals.prompts[::number],
        answers=arrivals.answers[::number],
    )
    engine = offer.server.loaded_engine(offer.server.costs(), offer.estimate.kv_bytes)
    return engine.simulate(share, load.level, finds_rate=False)
