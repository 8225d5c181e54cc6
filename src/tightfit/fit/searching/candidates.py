"""Candidates for a plan: from a traced run with its problem to the choice whose own traced run just fits, or else holds least.

The solver is asked for the fastest choice within a limit, the workload is traced with it, and the limit is moved until the trace just fits.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

from tightfit.errors import ApplyError, CaptureError
from tightfit.fit.searching.allocator_choice import AllocatorChoice
from tightfit.fit.searching.bisection import Bisection
from tightfit.fit.searching.curves import Curves
from tightfit.fit.searching.offers import Offers
from tightfit.fit.searching.variants import Variant, Variants, needed_at
from tightfit.fit.traced_runs import TracedRun, TracedRuns
from tightfit.planner.option import Option
from tightfit.planner.problem import Problem, without
from tightfit.planner.solution import Solution, validate
from tightfit.planner.solve import least, solve
from tightfit.units import format_bytes, format_seconds

MAX_LIMITS = 16
# A lowest peak that was traced to be above the promised one by more than this share is looked for once more without what promised most, in any settings.
_SHORT = 0.1
_MAX_SHORT = 3
SOLVER_SECONDS = 10.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A traced run, with the variant and the solution that it was made from."""

    run: TracedRun
    variant: Variant
    solution: Solution


class Candidates:
    """Makes candidates within `budget_bytes`."""

    def __init__(
        self, runs: TracedRuns, offers: Offers, budget_bytes: int, *, host_bytes: int = 0, disk_bytes: int = 0
    ) -> None:
        self._runs = runs
        self._offers = offers
        self._budget_bytes = budget_bytes
        self._settings = AllocatorChoice(runs, offers, self.fits)
        variants = Variants(runs, offers, self._settings, host_bytes=host_bytes, disk_bytes=disk_bytes)
        self.variant = variants.of
        self.curves = Curves()
        self.best_seen: Candidate | None = None
        """The best of all candidates so far: what is left of a search that is interrupted."""
        self.fitting: list[Candidate] = []
        """All candidates so far that fit."""

    def begin(self) -> None:
        """Forgets what an earlier search has seen: other things may have been refused since."""
        self.best_seen, self.fitting = None, []

    def fits(self, run: TracedRun) -> bool:
        """Whether `run` is within the budget, at the upper end of its range."""
        return run.needed_bytes <= self._budget_bytes

    def best_of(
        self, coarse: Sequence[Option], base: TracedRun, max_traces: int, *, is_last: bool = False
    ) -> Candidate | None:
        """The best candidate with the coarse options on it: the first that fits, or, where it `is_last`, the fastest, or else the one that holds
        least."""
        run, retaining = self.begun(coarse, base)
        if run is None:
            return None
        best = self._bisected(run, retaining, max_traces, only_free=True, is_last=is_last)
        # Emptying the allocator's cache takes time at each step, so the limits are narrowed with it only where nothing fits without.
        if best is not None and not self.fits(best.run):
            best = self.better(best, self._bisected(run, retaining, max_traces, only_free=False, is_last=is_last))
        return best

    def _bisected(
        self, run: TracedRun, retaining: Sequence[Option], max_traces: int, *, only_free: bool, is_last: bool
    ) -> Candidate | None:
        """The best of the runs on the way to the limit at which a trace just fits, with settings of the allocator that are free, or with any.

        Not `is_last`: the first that fits ends it.
        """
        variant = self.variant(run, retaining)
        settings = {option.technique for option in self._offers.of_the_allocator(run.profile)}
        limits = Bisection(budget_bytes=self._budget_bytes, limit=self._budget_bytes - variant.gap_bytes)
        best: Candidate | None = None
        if run.options and not variant.is_predicted:
            best = self._seen(self._settings.best(run, settings), variant, _nothing_more(variant))
        traced_for: dict[tuple[int, ...], TracedRun] = {}
        for _ in range(MAX_LIMITS):
            # Nothing more comes of a run that what was refused is on.
            if len(traced_for) == max_traces or self._offers.refusals.is_any_refused(run.options):
                break
            is_last_trace = len(traced_for) == max_traces - 1
            nothing_fits = best is None or not self.fits(best.run)
            # The last trace of a search in vain is of what holds least.
            solution = _solve(variant.problem, 0 if is_last_trace and nothing_fits else limits.limit)
            found = traced_for.get(solution.chosen)
            if found is None:
                chosen = (variant.problem.options[i] for i in solution.chosen)
                # A variant that is looked at for longer may be the plan's.
                meanwhile = functools.partial(self.curves.of, variant) if traced_for else None
                traced = self.traced((*variant.run.options, *chosen), meanwhile)
                if traced is None:
                    # What was refused changes the problem, and the numbers of its options.
                    variant, traced_for = self.variant(run, retaining), {}
                    continue
                free = self._settings.best(traced, settings, only_free=True)
                fastest = free if self.fits(free) else self._settings.best(traced, settings)
                found = traced_for[solution.chosen] = free if only_free else fastest
                best = self.better(best, self._seen(fastest, variant, solution))
            fits = self.fits(found)
            if (fits and not (is_last and solution.chosen)) or not (fits or solution.fits):
                break
            if not limits.narrow(promised=solution.peak_bytes, traced=found.needed_bytes):
                break
        return best

    def least_of(
        self, coarse: Sequence[Option], base: TracedRun, *, below: Candidate | None = None
    ) -> Candidate | None:
        """The candidate with the lowest peak with the coarse options on it, whatever the budget is. What is not even promised to hold less than `below`
        is not traced."""
        run, retaining = self.begun(coarse, base)
        if run is None:
            return None
        best: Candidate | None = None
        # Places of techniques that were traced to save much less than they promise. With other settings, such as fewer tiles, they do as little.
        short: set[tuple[str, str]] = set()
        held_bytes: int | None = None
        for _ in range(MAX_LIMITS):
            if self._offers.refusals.is_any_refused(run.options):
                return best
            variant = self.variant(run, retaining)
            if run.options and not variant.is_predicted:
                alone = self._seen(self._settings.smallest(run), variant, _nothing_more(variant))
                best = _smaller(best, alone)
            left_out = {o.key for o in variant.problem.options if _place(o) in short}
            variant = dataclasses.replace(variant, problem=without(variant.problem, left_out))
            solution = _solve(variant.problem, 0)
            if not solution.chosen and not variant.is_predicted:
                return best
            if below is not None and needed_at(solution.peak_bytes, variant) >= below.run.needed_bytes:
                return best
            chosen = [variant.problem.options[i] for i in solution.chosen]
            traced = self.traced((*variant.run.options, *chosen))
            # What was refused changes the problem.
            if traced is None:
                continue
            # The fastest of those with the lowest peak: nothing is known of what is faster and holds more.
            unbound = dataclasses.replace(solution, bound_seconds=min(0.0, solution.seconds), is_proven=False)
            best = _smaller(best, self._seen(self._settings.smallest(traced), variant, unbound))
            allocated_bytes = traced.estimate.peak.allocated_bytes
            is_short = allocated_bytes > (1 + _SHORT) * solution.peak_bytes
            # Where less is not held without one that promised much, the peak has other causes.
            is_in_vain = held_bytes is not None and allocated_bytes >= held_bytes
            if not (is_short and chosen) or is_in_vain or len(short) >= _MAX_SHORT:
                return best
            held_bytes = allocated_bytes
            short.add(_place(max(chosen, key=lambda o: max((-c.num_bytes for c in o.changes), default=0))))
        return best

    def with_solution(self, variant: Variant, solution: Solution) -> Candidate | None:
        """The candidate that `solution` is traced to be; None if the workload does not run with it."""
        chosen = (variant.problem.options[i] for i in solution.chosen)
        traced = self.traced((*variant.run.options, *chosen))
        if traced is None:
            return None
        names = {option.technique for option in self._offers.of_the_allocator(traced.profile)}
        return self._seen(self._settings.best(traced, names), variant, solution)

    def _seen(self, run: TracedRun, variant: Variant, solution: Solution) -> Candidate:
        """A candidate, which is remembered if it is the best so far."""
        found = Candidate(run=run, variant=variant, solution=solution)
        self.best_seen = self.better(self.best_seen, found)
        if self.fits(run):
            self.fitting.append(found)
        best = self.best_seen.run if self.best_seen is not None else run
        size, seconds = format_bytes(best.needed_bytes), format_seconds(best.seconds)
        self._runs.log.best(f"{'fits' if self.fits(best) else 'does not fit'}: {size}, {seconds} per step")
        return found

    def traced(self, options: Sequence[Option], meanwhile: Callable[[], object] | None = None) -> TracedRun | None:
        """The traced run with `options`; None, with what is to blame refused from now on, if the workload does not run with them. `meanwhile` is called while
        it is traced."""
        try:
            return self._runs.run_with(options, meanwhile)
        except (ApplyError, CaptureError) as error:
            self._offers.refuse(options, error)
            return None

    def begun(self, options: Sequence[Option], base: TracedRun) -> tuple[TracedRun | None, tuple[Option, ...]]:
        """The run with those `options` that need a trace, which is `base` where none does and None where it cannot be run, and those that only retain
        the graph, without any that were refused since they were offered."""
        left = [option for option in options if not self._offers.refusals.is_refused(option)]
        coarse = [option for option in left if option.needs_new_trace]
        retaining = tuple(option for option in left if not option.needs_new_trace)
        return self.traced(coarse) if coarse else base, retaining

    def better(self, one: Candidate | None, other: Candidate | None) -> Candidate | None:
        """The faster of those that fit, else the smaller one; the first where they are alike."""
        if one is None or other is None:
            return one or other
        ranks = [
            (0, each.run.seconds, each.run.needed_bytes)
            if self.fits(each.run)
            else (1, each.run.needed_bytes, each.run.seconds)
            for each in (one, other)
        ]
        return one if ranks[0] <= ranks[1] else other


def _smaller(one: Candidate | None, other: Candidate) -> Candidate:
    """The one that holds less; the first where they are alike."""
    return other if one is None or other.run.needed_bytes < one.run.needed_bytes else one


def _place(option: Option) -> tuple[str, str]:
    return option.technique, option.where


def _solve(problem: Problem, limit: int) -> Solution:
    """The fastest choice within `limit`, or, said not to fit, the fastest of those that hold least."""
    solution = solve(problem, limit, work_seconds=SOLVER_SECONDS)
    if solution.fits:
        faults = validate(problem, solution, limit)
        assert not faults, faults
        return solution
    smallest = least(problem, work_seconds=SOLVER_SECONDS)
    faults = validate(problem, smallest, smallest.peak_bytes)
    assert not faults, faults
    return dataclasses.replace(smallest, fits=smallest.peak_bytes <= limit)


def _nothing_more(variant: Variant) -> Solution:
    """The choice of none of a variant's options."""
    peak = variant.problem.peak_bytes(())
    return Solution(chosen=(), fits=True, seconds=0.0, peak_bytes=peak, bound_seconds=0.0, is_proven=False)
