"""Plans: from a workload to the fastest combination of techniques that fits, checked by tracing the workload with it.

The plain run is traced. If it fits, there is nothing to do, but for what host memory is given for and makes it faster. If not, the techniques say what they could do, as numbers; a solver takes the
fastest combination that promises to fit; the workload is traced again with that combination on it. If the trace holds more than was promised,
the limit is lowered by the difference and the solver asked again. So a plan's figures are a trace's, never a promise's.

Techniques that change a run so much that the others' numbers no longer hold (another attention kernel, another precision) are traced first, one
variant of the workload each, and the rest is solved on top.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

from tightfit.fit.searching.allowed import Allowed, Without
from tightfit.fit.searching.candidates import Candidate, Candidates
from tightfit.fit.searching.corrected_seconds import is_doubtful, looked_again, predicted_seconds
from tightfit.fit.searching.least_peak import LeastPeak, compatible, kind_of, saved_bytes
from tightfit.fit.searching.not_offered import not_offered
from tightfit.fit.searching.offers import Offers
from tightfit.fit.searching.ranking import simplest_of_the_fastest
from tightfit.fit.searching.variants import Variant, context_bytes, gap_after
from tightfit.fit.traced_runs import TracedRun, TracedRuns
from tightfit.planner import problem as problems
from tightfit.planner.option import Option
from tightfit.planner.solution import Solution
from tightfit.planner.solve import solve
from tightfit.techniques.recomputation.only_above import TECHNIQUES
from tightfit.techniques.registry import techniques

# Traces of one search: a limit whose answer was traced before costs no trace.
MAX_CORRECTIONS = 5
MAX_CORRECTIONS_OF_A_VARIANT = 3
MAX_CORRECTIONS_OF_THE_BEST = 7
MAX_CORRECTIONS_OF_A_ROUGH_SEARCH = 2
# What a variant is promised to take before it is traced is taken to be too high by this share, so that it is tried rather than not.
_DOUBT_OF_A_VARIANT = 0.01
# Where nothing fits, a variant that could hold less by less than this share of it is not worth its traces.
_WORTH_A_VARIANT = 0.002
# What makes a program that fits faster by less than this share of its step is left out.
_WORTH_HOST_MEMORY = 0.01
# A plan with far tiers is compared with one without where that may be faster by more than this share.
_WORTH_A_SEARCH = 0.005
_SECONDS_TO_RELAX = 3.0
_RECOMPUTING = (*TECHNIQUES, "offloaded_checkpointing")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search has found. `best` fits, or else holds least; `variant` and `solution` are what it was made from, None for the plain run.
    `is_interrupted`: the search was ended before its time. `not_offered`: techniques that could not be chosen, with the reasons, where nothing fits."""

    base: TracedRun
    best: TracedRun
    fits: bool
    variant: Variant | None
    solution: Solution | None
    forbidden: tuple[Option, ...]
    refused: tuple[tuple[str, str], ...]
    is_interrupted: bool = False
    not_offered: tuple[tuple[str, str], ...] = ()


class Search:
    """One search for a plan within `budget_bytes`. `offers` knows what was refused; it may be told of more, and the search be run again.

    `is_rough`: with few traces; whether something fits is as certain, the plan may be a little slower than it has to be.
    """

    def __init__(
        self,
        runs: TracedRuns,
        budget_bytes: int,
        allowed: Allowed,
        *,
        host_bytes: int = 0,
        disk_bytes: int = 0,
        is_rough: bool = False,
        offers: Offers | None = None,
        is_part: bool = False,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.offers = offers or Offers(runs, allowed)
        self.candidates = Candidates(runs, self.offers, budget_bytes, host_bytes=host_bytes, disk_bytes=disk_bytes)
        self._runs = runs
        self._allowed = allowed
        self._host_bytes, self._disk_bytes = host_bytes, disk_bytes
        self._fits = self.candidates.fits
        self._is_rough = is_rough
        # Of another search, which compares what both find.
        self._is_part = is_part

    def within(self, budget_bytes: int) -> "Search":
        """The same search within another budget; what one is told of refusals, both know."""
        return Search(
            self._runs,
            budget_bytes,
            self._allowed,
            host_bytes=self._host_bytes,
            disk_bytes=self._disk_bytes,
            is_rough=self._is_rough,
            offers=self.offers,
        )

    def run(self) -> Found:
        """Searches. Interrupted (Ctrl-C), it is over, with the best candidate so far.

        Raises:
            KeyboardInterrupt: interrupted before there was one that is better than the plain run.
        """
        base = self._runs.run_with(())
        if self._fits(base):
            return dataclasses.replace(self._found(base, None), best=_faster(self, base))
        self.candidates.begin()
        try:
            best = self._best(base)
        except KeyboardInterrupt:
            best = self.candidates.best_seen
            if best is None or not (self._fits(best.run) or best.run.needed_bytes < base.needed_bytes):
                raise
            return dataclasses.replace(self._found(base, best), is_interrupted=True)
        if best is None or (not self._fits(best.run) and base.needed_bytes <= best.run.needed_bytes):
            return self._found(base, None)
        return self._found(base, best)

    def _best(self, base: TracedRun) -> Candidate | None:
        """The best candidate, where the plain run does not fit. Where none does, it is the one with the lowest peak, which no budget changes."""
        coarse = self._bundles(base)
        free = [
            o
            for bundle in coarse
            for o in bundle
            if _seconds(bundle) <= 0 and all(o.exact and not o.retains for o in bundle)
        ]
        rest = [bundle for bundle in coarse if not set(_keys(bundle)) <= set(_keys(free))]
        start = self.candidates.traced(free)
        if start is None:
            free, start = [], base
        least = LeastPeak(self._runs, self.offers, self.candidates, free=free, bundles=rest)
        smallest = None
        if not least.could_reach(self.budget_bytes, start):
            smallest = least.search(base, start)
            if smallest is None or not self._fits(smallest.run):
                return smallest
        results = [*self._results(base, start, free, rest), *([] if smallest is None else [smallest])]
        if not any(self._fits(each.run) for each in results):
            return least.search(base, start)
        best = self._refined(results, base)
        if best is None or self._is_rough:
            return best
        best = looked_again(best, self.candidates)
        best = self._simplest(best, base) if self._fits(best.run) else best
        return _no_slower_with_tiers(self, best, base)

    def _results(
        self, base: TracedRun, start: TracedRun, free: Sequence[Option], rest: Sequence[Sequence[Option]]
    ) -> list[Candidate]:
        """The best candidate of each variant that is worth its traces; `start` is the run with the `free` options, `rest` are the other bundles."""
        most = MAX_CORRECTIONS_OF_A_ROUGH_SEARCH if self._is_rough else MAX_CORRECTIONS
        of_a_variant = min(most, MAX_CORRECTIONS_OF_A_VARIANT)
        results = [self.candidates.best_of(free, base, most)]
        settled: set[str] = set()
        for bundle in sorted(rest, key=_seconds):
            # Of one technique's settings, a slower one is not tried when a faster one was found to fit.
            if bundle[0].technique not in settled and self._could_help(bundle, start, results):
                results.append(self.candidates.best_of((*free, *bundle), base, of_a_variant))
                if results[-1] is not None and self._fits(results[-1].run):
                    settled.add(bundle[0].technique)
        if not any(r is not None and self._fits(r.run) for r in results):
            everything = [o for bundle in compatible(sorted(rest, key=saved_bytes, reverse=True)) for o in bundle]
            held = min((r.run.needed_bytes for r in results if r is not None), default=base.needed_bytes)
            if saved_bytes(everything) > _WORTH_A_VARIANT * held:
                results.append(self.candidates.best_of((*free, *everything), base, of_a_variant))
        return [result for result in results if result is not None]

    def _refined(self, results: Sequence[Candidate], base: TracedRun) -> Candidate | None:
        """The best of the results, after a closer look at those that fit and are nearly as fast as the fastest."""
        better, best = self.candidates.better, None
        for result in results:
            best = better(best, result)
        if best is None or not self._fits(best.run) or self._is_rough:
            return best
        fastest = best.run.seconds
        for result in results:
            if self._fits(result.run) and result.run.seconds <= (1 + _DOUBT_OF_A_VARIANT) * fastest:
                options = result.variant.run.options
                best = better(best, self.candidates.best_of(options, base, MAX_CORRECTIONS_OF_THE_BEST, is_last=True))
        return best

    def _simplest(self, best: Candidate, base: TracedRun) -> Candidate:
        """The simplest of those that cannot be told from `best`, which fits."""
        found = simplest_of_the_fastest(best, self.candidates.fitting)
        if found is best:
            return best
        # So far it may be the first of its variant that was seen to fit, with room for less of what takes time.
        self.candidates.best_of(found.variant.run.options, base, MAX_CORRECTIONS_OF_THE_BEST, is_last=True)
        return simplest_of_the_fastest(best, self.candidates.fitting)

    def _could_help(self, bundle: Sequence[Option], start: TracedRun, made: Sequence[Candidate | None]) -> bool:
        """Whether a variant with `bundle` is worth its traces: it could be faster than what fits, or, if nothing does, could fit."""
        runs = [candidate.run for candidate in made if candidate is not None]
        fitting = [run.seconds for run in runs if self._fits(run)]
        if fitting:
            return self._seconds_at_best(bundle, start) < (1 + _DOUBT_OF_A_VARIANT) * min(fitting)
        min_bytes = min((run.needed_bytes for run in runs), default=start.needed_bytes)
        return min_bytes - saved_bytes(bundle) <= self.budget_bytes

    def _seconds_at_best(self, bundle: Sequence[Option], start: TracedRun) -> float:
        """What the best plan with `bundle` would take, as far as that can be told without a trace of it."""
        kind = kind_of(bundle[0])
        own = [o for o in self.offers.options(start.profile) if o.needs_new_trace and kind_of(o) == kind]
        variant = self.candidates.variant(start, [option for option in bundle if option.retains])
        left = problems.with_taken(variant.problem, own)
        gap = gap_after(own, variant, left)
        found = solve(left, self.budget_bytes - gap, work_seconds=_SECONDS_TO_RELAX, breaks_ties=False)
        return variant.run.seconds + _seconds(own) + found.seconds if found.fits else math.inf

    def _bundles(self, base: TracedRun) -> list[list[Option]]:
        """The coarse options, each technique's with the same settings together, and of each technique that retains the graph the one that saves most."""
        bundles: dict[tuple[str, str], list[Option]] = {}
        retaining: dict[str, Option] = {}
        for option in self.offers.options(base.profile):
            if option.needs_new_trace:
                bundles.setdefault(kind_of(option), []).append(option)
            elif option.retains:
                other = retaining.setdefault(option.technique, option)
                retaining[option.technique] = max(other, option, key=lambda o: (saved_bytes([o]), -o.seconds))
        return [*bundles.values(), *([option] for option in retaining.values())]

    def _found(self, base: TracedRun, best: Candidate | None) -> Found:
        run = base if best is None else best.run
        left_out = []
        if not self._fits(run):
            profiles = [base.profile] if base.later is None else [base.profile, base.later]
            left_out = not_offered(self.offers, profiles, host_bytes=self._host_bytes, disk_bytes=self._disk_bytes)
        return Found(
            base=base,
            best=run,
            fits=self._fits(run),
            variant=None if best is None else best.variant,
            solution=None if best is None else best.solution,
            forbidden=self.offers.forbidden,
            refused=self.offers.refusals.rows(),
            not_offered=tuple(left_out),
        )


def _faster(search: Search, base: TracedRun) -> TracedRun:
    """The plain run, which fits, or a faster one with an option of those that are for speed alone."""
    for_speed = (
        {name for name, technique in techniques().items() if technique.is_for_speed} if search._host_bytes else ()
    )
    offered = search.offers.options(base.profile) if for_speed else ()
    best = base
    for option in sorted(offered, key=lambda each: each.seconds):
        # The first that holds what it promises: others promise less.
        if best is base and option.technique in for_speed and option.host_bytes <= search._host_bytes:
            run = search.candidates.traced([option])
            is_better = run is not None and search._fits(run) and run.seconds < (1 - _WORTH_HOST_MEMORY) * base.seconds
            best = run if run is not None and is_better else base
    return best


def _part(search: Search, allowed: Allowed, offers: Offers | None, *, host_bytes: int, disk_bytes: int) -> Search:
    return Search(
        search._runs,
        search.budget_bytes,
        allowed,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        offers=offers,
        is_part=True,
    )


def _may_be_faster_without_tiers(search: Search, best: Candidate) -> bool:
    """Whether a step could take less without far tiers, on the variant of `best`, if its allocator had no gaps at all."""
    variant = best.variant
    far = {o.key for o in variant.problem.options if o.host_bytes or o.disk_bytes}
    if not far:
        return False
    limit = search.budget_bytes - context_bytes(variant.run)
    near = problems.without(variant.problem, far)
    found = solve(near, limit, work_seconds=_SECONDS_TO_RELAX, breaks_ties=False)
    return found.fits and variant.run.seconds + found.seconds < (1 - _WORTH_A_SEARCH) * predicted_seconds(best)


def _no_slower_with_tiers(search: Search, best: Candidate, base: TracedRun) -> Candidate:
    """`best`, which may use far tiers, or a faster one without them or without recomputation.

    Where a trace takes another time than what the solver has compared, as copies that should have been hidden are not, either may be faster; and a plan
    that mixes both may have missed one that needs a trace of its own. The limits at which traces just fit are others without tiers too.
    """
    options = best.run.options
    uses_tiers = any(option.host_bytes or option.disk_bytes for option in options)
    if search._is_part or not (search._host_bytes or search._disk_bytes) or not search._fits(best.run):
        return best
    parts = []
    if (uses_tiers and is_doubtful(best)) or _may_be_faster_without_tiers(search, best):
        parts.append(_part(search, search._allowed, search.offers, host_bytes=0, disk_bytes=0))
    if uses_tiers and (is_doubtful(best) or any(option.technique in _RECOMPUTING for option in options)):
        recomputing = tuple(Without(technique=name) for name in _RECOMPUTING)
        allowed = dataclasses.replace(search._allowed, without=(*search._allowed.without, *recomputing))
        parts.append(_part(search, allowed, None, host_bytes=search._host_bytes, disk_bytes=search._disk_bytes))
    for part in parts:
        part.offers.refusals = search.offers.refusals
        part.candidates.begin()
        best = search.candidates.better(best, part._best(base)) or best
    return best


def _seconds(bundle: Iterable[Option]) -> float:
    return sum(option.seconds for option in bundle)


def _keys(options: Iterable[Option]) -> list[str]:
    return [option.key for option in options]
