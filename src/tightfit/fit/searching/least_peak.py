"""The lowest peak that a search can reach, whatever the budget is: what a budget that cannot be met is told, and how that is known early.

Every variant of the workload (what needs a trace of its own: a number of micro-batches, another kernel, another precision, all that go together) is
first solved for its lowest peak as predicted from one traced run. The variants are then traced from the lowest prediction up, with the choice that
has the lowest peak on each, until the next prediction is above what was reached. No step depends on a budget, so neither does the answer.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from tightfit.fit.searching.candidates import Candidate, Candidates
from tightfit.fit.searching.offers import Offers
from tightfit.fit.searching.variants import context_bytes, needed_at
from tightfit.fit.traced_runs import TracedRun, TracedRuns
from tightfit.planner import problem as problems
from tightfit.planner.option import Option
from tightfit.planner.reached_at_once import is_reached_at_once
from tightfit.planner.solve import least_peak
from tightfit.tape import Tape

MAX_VARIANTS = 6
# Predictions of variants that were not traced are off by a few per cent; one that is above what was reached by less is traced all the same.
_DOUBT_OF_A_PREDICTION = 0.02
# A trace holds what was predicted if it is above by no more than this share.
_REACHED = 0.005
_SECONDS_TO_PREDICT = 2.0
# A budget that is less than this share above the lowest prediction, both without the context, may be below what can be reached: that is found out first.
_NEAR = 0.05


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The lowest peak (the process's, at the end that has to fit) that a variant is predicted to reach, and the options that need its trace."""

    needed_bytes: int
    options: tuple[Option, ...]


class LeastPeak:
    """Looks for the lowest peak of one search. `bundles` are the options that need a trace of their own, each technique's with the same settings
    together, and `free` those among them that cost nothing."""

    def __init__(
        self,
        runs: TracedRuns,
        offers: Offers,
        candidates: Candidates,
        *,
        free: Sequence[Option],
        bundles: Sequence[Sequence[Option]],
    ) -> None:
        self._runs = runs
        self._offers = offers
        self._candidates = candidates
        self._free = tuple(free)
        self._bundles = bundles
        self._predicted: list[Prediction] | None = None

    def could_reach(self, budget_bytes: int, start: TracedRun) -> bool:
        """Whether `budget_bytes` is well above what a variant is predicted to reach; `start` is the run with the free options."""
        # Seen at once for most budgets; a lowest peak takes a solver, and those of all variants take it longer.
        context = context_bytes(start)
        plain = self._candidates.variant(start).problem
        share = (
            (budget_bytes - context) / (1 + _NEAR) / max(1, self._needed_bytes(plain.peak_bytes(()), start) - context)
        )
        if is_reached_at_once(plain, int(share * plain.peak_bytes(()))):
            return True
        if _is_well_below(self._prediction((), start).needed_bytes, budget_bytes, start):
            return True
        return _is_well_below(self.predictions(start)[0].needed_bytes, budget_bytes, start)

    def predictions(self, start: TracedRun) -> list[Prediction]:
        """The variants by what they are predicted to reach, lowest first; `start` is the run with the free options."""
        if self._predicted is None:
            together = [
                option
                for bundle in compatible(sorted(self._bundles, key=saved_bytes, reverse=True))
                for option in bundle
            ]
            variants = {tuple(option.key for option in options): options for options in [(), *self._bundles, together]}
            found = [self._prediction(options, start) for options in variants.values()]
            # Of two alike the one with fewer options: each may fail.
            self._predicted = sorted(found, key=lambda each: (each.needed_bytes, len(each.options)))
        return self._predicted

    def _prediction(self, options: Sequence[Option], start: TracedRun) -> Prediction:
        kinds = {kind_of(option) for option in options}
        own = [o for o in self._offers.options(start.profile) if o.needs_new_trace and kind_of(o) in kinds]
        variant = self._candidates.variant(start, [option for option in options if option.retains])
        left = problems.with_taken(variant.problem, own)
        peak = least_peak(left, work_seconds=_SECONDS_TO_PREDICT)
        return Prediction(needed_bytes=self._needed_bytes(peak, start), options=(*self._free, *options))

    def _needed_bytes(self, peak_bytes: int, start: TracedRun) -> int:
        return needed_at(peak_bytes, self._candidates.variant(start))

    def search(self, base: TracedRun, start: TracedRun) -> Candidate | None:
        """The candidate with the lowest peak; None where nothing can be put on the workload."""
        best: Candidate | None = None
        seen: list[tuple[TracedRun, tuple[Option, ...]]] = []
        reached: set[int] = set()
        for prediction in self.predictions(start)[:MAX_VARIANTS]:
            if best is not None and prediction.needed_bytes > (1 + _DOUBT_OF_A_PREDICTION) * best.run.needed_bytes:
                break
            # Predicted to the byte as another that holds what it was predicted to: the peak is where their options change nothing, as in an evaluation.
            if prediction.needed_bytes in reached:
                continue
            run, retaining = self._candidates.begun(prediction.options, base)
            if run is None or any(taken == retaining and _are_alike(run.tape, other.tape) for other, taken in seen):
                continue
            seen.append((run, retaining))
            found = self._candidates.least_of(prediction.options, base, below=best)
            if found is not None and found.run.needed_bytes <= (1 + _REACHED) * prediction.needed_bytes:
                reached.add(prediction.needed_bytes)
            if found is not None and (best is None or _rank(found) < _rank(best)):
                best = found
        return best


def _is_well_below(needed_bytes: int, budget_bytes: int, start: TracedRun) -> bool:
    # The context, which is most of what a small model needs, is the same for all.
    context = context_bytes(start)
    return (1 + _NEAR) * (needed_bytes - context) < budget_bytes - context


def _are_alike(one: Tape, other: Tape) -> bool:
    """Whether two runs allocate and free the same, as with four parts and with eight of a batch of four: what else is done to them comes to the same too."""
    return (
        one.strings == other.strings
        and np.array_equal(one.operators.name, other.operators.name)
        and np.array_equal(one.storages.num_bytes, other.storages.num_bytes)
        and np.array_equal(one.events.kind, other.events.kind)
        and np.array_equal(one.events.storage, other.events.storage)
    )


def _rank(candidate: Candidate) -> tuple[int, float]:
    return candidate.run.needed_bytes, candidate.run.seconds


def kind_of(option: Option) -> tuple[str, str]:
    """What the options of a bundle share: the technique and the settings."""
    return option.technique, repr(sorted(option.settings.items()))


def saved_bytes(bundle: Iterable[Option]) -> int:
    """At most what a bundle takes from any time step."""
    return sum(max((-change.num_bytes for change in option.changes), default=0) for option in bundle)


def compatible(bundles: Iterable[Sequence[Option]]) -> list[Sequence[Option]]:
    """The bundles in order, without those that share a slot with an earlier one."""
    taken: set[str] = set()
    chosen = []
    for bundle in bundles:
        slots = {slot for option in bundle for slot in option.slots}
        if not taken & slots:
            chosen.append(bundle)
            taken |= slots
    return chosen
