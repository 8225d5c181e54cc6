"""Plans: from a workload to the fastest combination of techniques that fits, checked by tracing the workload with it.

The plain run is traced. If it fits, there is nothing to do. If not, the techniques say what they could do, as numbers; a solver takes the
fastest combination that promises to fit; the workload is traced again with that combination on it. If the trace holds more than was promised,
the limit is lowered by the difference and the solver asked again. So a plan's figures are a trace's, never a promise's.

Techniques that change a run so much that the others' numbers no longer hold (another attention kernel, another precision) are traced first, one
variant of the workload each, and the rest is solved on top.
"""

import dataclasses
import fnmatch
import math
from collections.abc import Iterable, Sequence

from tightfit.allocator.settings import AllocatorSettings
from tightfit.errors import ApplyError, CaptureError
from tightfit.errors.faults import answering
from tightfit.fit.trials import Bench, Trial
from tightfit.planner import problem as problems
from tightfit.planner.option import Option
from tightfit.planner.problem import Problem
from tightfit.planner.solution import Solution, validate
from tightfit.planner.solve import least, solve
from tightfit.simulate.timeline_bytes import replay_levels
from tightfit.simulate.workspaces import with_workspaces_of
from tightfit.tape import Tape
from tightfit.techniques.catalogue import techniques
from tightfit.techniques.permitted import grouped, modules_of, obstacle

# Traces and limits of one search: a limit whose answer was traced before costs no trace.
MAX_CORRECTIONS = 5
MAX_CORRECTIONS_OF_A_VARIANT = 3
MAX_CORRECTIONS_OF_THE_BEST = 7
MAX_LIMITS = 16
# What a variant is promised to take before it is traced is taken to be too high by this share, so that it is tried rather than not.
_DOUBT_OF_A_VARIANT = 0.01
# Where nothing fits, a variant that could hold less by less than this share of it is not worth its traces.
_WORTH_A_VARIANT = 0.002
_SECONDS_TO_RELAX = 3.0
# Room of less than this share of the budget is not worth another trace.
_WORTH_ANOTHER_TRY = 0.02
SOLVER_SECONDS = 10.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Without:
    """A technique that a user wants left out: at all places, or wherever it would run a module whose path matches one of `places` (`GPT.h.*`)."""

    technique: str
    places: tuple[str, ...] = ()

    def matches(self, option: Option) -> bool:
        """Whether `option` is left out."""
        if option.technique != self.technique:
            return False
        return not self.places or any(fnmatch.fnmatchcase(m, p) for p in self.places for m in modules_of(option))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """Which lossy techniques a user allows: all of them, or those that are named; and what is left out."""

    all_lossy: bool = False
    names: frozenset[str] = frozenset()
    without: tuple[Without, ...] = ()

    def permits(self, option: Option) -> bool:
        """Whether a plan may take `option`, as far as its exactness goes."""
        return option.exact or self.all_lossy or option.technique in self.names

    def leaves_out(self, option: Option) -> bool:
        """Whether the user wants it left out."""
        return any(each.matches(option) for each in self.without)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A traced run, with the problem of what else to do to it. `gap_bytes`: what its card needs beyond the bytes that are allocated."""

    trial: Trial
    problem: Problem
    gap_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search has found. `best` fits, or else holds least; `variant` and `solution` are what it was made from, None for the plain run."""

    base: Trial
    best: Trial
    fits: bool
    variant: Variant | None
    solution: Solution | None
    forbidden: tuple[Option, ...]
    refused: tuple[tuple[str, str], ...]


Made = tuple[Trial, Variant, Solution]
"""A trial, with the variant and the solution that it was made from."""


class Limits:
    """What the solver is given as its limit, until the trace of its answer just fits `budget_bytes`.

    By how much a trace holds more than was promised depends on the choices, so one correction may overshoot: the next limit always lies between
    the largest whose answer has fitted and the smallest whose answer has not. Where the excess does not shrink with the promise (whole segments, and
    the doubt about them, do not follow it), the step down is doubled each time.
    """

    def __init__(self, *, budget_bytes: int, limit: int) -> None:
        self.budget_bytes = budget_bytes
        self.limit = limit
        self._fitted: int | None = None
        self._exceeded: int | None = None
        self._excess = 0
        self._step = 0

    def narrow(self, *, promised: int, traced: int) -> bool:
        """Takes in the trace of the answer to the present limit; whether another limit is worth a try."""
        room = self.budget_bytes - traced
        if room >= 0:
            self._fitted = self.limit
        else:
            self._exceeded = self.limit
        if 0 <= room <= _WORTH_ANOTHER_TRY * self.budget_bytes:
            return False
        following = promised + room
        if room < 0:
            is_stuck = 0 < self._excess < 2 * -room
            self._step = 2 * self._step if is_stuck else -room
            self._excess = -room
            following = promised - self._step
        if self._fitted is not None and self._exceeded is not None:
            if self._exceeded - self._fitted < _WORTH_ANOTHER_TRY * self.budget_bytes / 4:
                return False
            if not self._fitted < following < self._exceeded:
                following = (self._fitted + self._exceeded) // 2
        elif (following <= self.limit) == (room >= 0):
            following = self.limit + room
        self.limit = following
        return True


class Search:
    """One search for a plan within `budget_bytes`."""

    def __init__(
        self, bench: Bench, budget_bytes: int, allowed: Allowed, *, host_bytes: int = 0, disk_bytes: int = 0
    ) -> None:
        self.bench = bench
        self.budget_bytes = budget_bytes
        self.allowed = allowed
        self.host_bytes = host_bytes
        self.disk_bytes = disk_bytes
        self.refused: dict[str, str] = {}
        self._refused_places: dict[tuple[str, str], str] = {}
        self._refused_kinds: set[str] = set()
        # By technique and place: what the effects of the program forbid.
        self._left_out: dict[tuple[str, str], str] = {}
        self._forbidden: dict[str, Option] = {}
        # By the tape's identity, which holds as long as the tape is kept beside its options.
        self._offered: dict[tuple[str, int], tuple[Tape, list[Option]]] = {}
        self._variants: dict[tuple[str, ...], Variant] = {}

    def run(self) -> Found:
        """Searches."""
        base = self.bench.trial(())
        if self._fits(base):
            return self._found(base, base, None, None)
        coarse = self._bundles(base)
        free = [o for bundle in coarse for o in bundle if _seconds(bundle) <= 0 and all(o.exact for o in bundle)]
        rest = [bundle for bundle in coarse if not set(_keys(bundle)) <= set(_keys(free))]
        results = [self._best_of(tuple(free), base, MAX_CORRECTIONS)]
        if results[0] is None and free:
            free = []
            results = [self._best_of((), base, MAX_CORRECTIONS)]
        start = self.bench.trial(free)
        settled: set[str] = set()
        for bundle in sorted(rest, key=_seconds):
            # Of one technique's settings, a slower one is not tried when a faster one was found to fit.
            if bundle[0].technique not in settled and self._could_help(bundle, start, results):
                results.append(self._best_of((*free, *bundle), base, MAX_CORRECTIONS_OF_A_VARIANT))
                if results[-1] is not None and self._fits(results[-1][0]):
                    settled.add(bundle[0].technique)
        if not any(r is not None and self._fits(r[0]) for r in results):
            everything = [o for bundle in _compatible(sorted(rest, key=_saved, reverse=True)) for o in bundle]
            held = min((r[0].high_bytes for r in results if r is not None), default=base.high_bytes)
            if _saved(everything) > _WORTH_A_VARIANT * held:
                results.append(self._best_of((*free, *everything), base, MAX_CORRECTIONS_OF_A_VARIANT))
        best = self._refined([result for result in results if result is not None], base)
        if best is None or (not self._fits(best[0]) and base.high_bytes <= best[0].high_bytes):
            return self._found(base, base, None, None)
        return self._found(base, *best)

    def _refined(self, results: Sequence[Made], base: Trial) -> Made | None:
        """The best of the results, after a closer look at those that fit and are nearly as fast as the fastest."""
        best: Made | None = None
        for result in results:
            best = self._better(best, result)
        if best is None or not self._fits(best[0]):
            return best
        fastest = best[0].seconds
        for trial, variant, _ in results:
            if self._fits(trial) and trial.seconds <= (1 + _DOUBT_OF_A_VARIANT) * fastest:
                best = self._better(
                    best, self._best_of(variant.trial.options, base, MAX_CORRECTIONS_OF_THE_BEST, is_last=True)
                )
        return best

    def _could_help(self, bundle: Sequence[Option], start: Trial, made: Sequence[Made | None]) -> bool:
        """Whether a variant with `bundle` is worth its traces: it could be faster than what fits, or, if nothing does, could fit."""
        trials = [m[0] for m in made if m is not None]
        fitting = [trial.seconds for trial in trials if self._fits(trial)]
        if fitting:
            return self._seconds_at_best(bundle, start) < (1 + _DOUBT_OF_A_VARIANT) * min(fitting)
        least_bytes = min((trial.high_bytes for trial in trials), default=start.high_bytes)
        return least_bytes - _saved(bundle) <= self.budget_bytes

    def _seconds_at_best(self, bundle: Sequence[Option], start: Trial) -> float:
        """What the best plan with `bundle` would take, as far as that can be told without a trace of it."""
        kind = _kind(bundle[0])
        own = [o for o in self._options(start.tape) if o.is_coarse and _kind(o) == kind]
        variant = self._variant(start)
        left = problems.with_taken(variant.problem, own)
        # Of what a card needs beyond the bytes that are allocated, all but the context comes and goes with them.
        context = start.estimate.peak.device_bytes - start.estimate.peak.reserved_bytes
        share = left.peak_bytes(()) / max(1, variant.problem.peak_bytes(()))
        gap = context + round(share * max(0, variant.gap_bytes - context))
        found = solve(left, self.budget_bytes - gap, time_limit_seconds=_SECONDS_TO_RELAX)
        return start.seconds + _seconds(own) + found.seconds if found.fits else math.inf

    def _found(self, base: Trial, best: Trial, variant: Variant | None, solution: Solution | None) -> Found:
        return Found(
            base=base,
            best=best,
            fits=self._fits(best),
            variant=variant,
            solution=solution,
            forbidden=tuple(self._forbidden.values()),
            refused=(*self.refused.items(), *self._refused_at_places()),
        )

    def _refused_at_places(self) -> Iterable[tuple[str, str]]:
        """A row for each technique and reason that it is left out for at some of its places."""
        refused = self._left_out | self._refused_places
        return grouped((name, place, reason) for (name, place), reason in refused.items() if name not in self.refused)

    def _fits(self, trial: Trial) -> bool:
        return trial.high_bytes <= self.budget_bytes

    def _bundles(self, base: Trial) -> list[list[Option]]:
        """The coarse options, each technique's with the same settings together."""
        bundles: dict[tuple[str, str], list[Option]] = {}
        for option in self._options(base.tape):
            if option.is_coarse:
                bundles.setdefault(_kind(option), []).append(option)
        return list(bundles.values())

    def _options(self, tape: Tape) -> list[Option]:
        """What the techniques offer on `tape`, but for what is not allowed or was refused."""
        found = []
        for name in techniques():
            if name in self.refused:
                continue
            for option in self._offers(name, tape):
                if (name, option.where) in self._refused_places:
                    continue
                if self.allowed.permits(option):
                    found.append(option)
                else:
                    self._forbidden.setdefault(option.key, option)
        return found

    def _offers(self, name: str, tape: Tape) -> list[Option]:
        """What one technique offers on `tape` and the effects of the program permit, asked once."""
        if (name, id(tape)) not in self._offered:
            with answering(f"technique {name}", technique=name):
                offered = list(techniques()[name].options(tape, self.bench.card))
            wanted = [option for option in offered if not self.allowed.leaves_out(option)]
            self._offered[name, id(tape)] = tape, [option for option in wanted if self._is_permitted(option, tape)]
        return self._offered[name, id(tape)][1]

    def _is_permitted(self, option: Option, tape: Tape) -> bool:
        effect = obstacle(tape, option, techniques()[option.technique].needs)
        if effect is not None and self.allowed.permits(option):
            self._left_out.setdefault((option.technique, option.where), effect.reason)
        return effect is None

    def _variant(self, trial: Trial) -> Variant:
        refused = (*self.refused, *(f"{name}@{where}" for name, where in self._refused_places))
        key = (*sorted(_keys(trial.options)), "refused:", *refused)
        if key not in self._variants:
            self._variants[key] = self._made_variant(trial)
        return self._variants[key]

    def _made_variant(self, trial: Trial) -> Variant:
        taken = {option.technique for option in trial.options}
        options = self._options(trial.tape)
        fine = [o for o in options if not o.is_coarse and not o.is_of_the_allocator and o.technique not in taken]
        tape = with_workspaces_of(self.bench.card, trial.tape, self.bench.calibration)
        levels = replay_levels(tape, AllocatorSettings()).allocated
        # What a run caches beyond what it holds says little of another run: to begin with, no more is counted than the allocator can be made to.
        gaps = [t.high_bytes - t.estimate.peak.allocated_bytes for t in self._with_all_settings(trial, options)]
        problem = problems.build(levels, fine, host_bytes=self.host_bytes, disk_bytes=self.disk_bytes)
        return Variant(trial=trial, problem=problem, gap_bytes=min(gaps))

    def _best_of(
        self, coarse: tuple[Option, ...], base: Trial, max_traces: int, *, is_last: bool = False
    ) -> Made | None:
        """The best trial with the coarse options on it: the first that fits, or, where it `is_last`, the fastest, or else the one that holds
        least."""
        trial = self._try(coarse) if coarse else base
        if trial is None:
            return None
        best = self._narrowed(trial, coarse, max_traces, only_free=True, is_last=is_last)
        # Emptying the allocator's cache takes time at each step, so the limits are narrowed with it only where nothing fits without.
        if best is not None and not self._fits(best[0]):
            best = self._better(best, self._narrowed(trial, coarse, max_traces, only_free=False, is_last=is_last))
        return best

    def _narrowed(
        self, trial: Trial, coarse: tuple[Option, ...], max_traces: int, *, only_free: bool, is_last: bool
    ) -> Made | None:
        """The best of the trials on the way to the limit at which a trace just fits, with settings of the allocator that are free, or with any.

        Not `is_last`: the first that fits ends it.
        """
        variant = self._variant(trial)
        settings = {option.technique for option in self._options(trial.tape) if option.is_of_the_allocator}
        limits = Limits(budget_bytes=self.budget_bytes, limit=self.budget_bytes - variant.gap_bytes)
        best: Made | None = (
            (self._with_best_settings(trial, settings), variant, _nothing_more(variant)) if coarse else None
        )
        made_of: dict[tuple[int, ...], Trial] = {}
        for _ in range(MAX_LIMITS):
            if len(made_of) == max_traces:
                break
            is_last_trace = len(made_of) == max_traces - 1
            nothing_fits = best is None or not self._fits(best[0])
            # The last trace of a search in vain is of what holds least.
            solution = self._solve(variant.problem, 0 if is_last_trace and nothing_fits else limits.limit)
            made = made_of.get(solution.chosen)
            if made is None:
                traced = self._try((*coarse, *(variant.problem.options[i] for i in solution.chosen)))
                if traced is None:
                    variant, made_of = self._variant(trial), {}
                    continue
                free = self._with_best_settings(traced, settings, only_free=True)
                fastest = free if self._fits(free) else self._with_best_settings(traced, settings)
                made = made_of[solution.chosen] = free if only_free else fastest
                best = self._better(best, (fastest, variant, solution))
            fits = self._fits(made)
            if (fits and not (is_last and solution.chosen)) or not (fits or solution.fits):
                break
            if not limits.narrow(promised=solution.peak_bytes, traced=made.high_bytes):
                break
        return best

    def _solve(self, problem: Problem, limit: int) -> Solution:
        """The fastest choice within `limit`, or, said not to fit, the fastest of those that hold least."""
        solution = solve(problem, limit, time_limit_seconds=SOLVER_SECONDS)
        if solution.fits:
            faults = validate(problem, solution, limit)
            assert not faults, faults
            return solution
        smallest = least(problem, time_limit_seconds=SOLVER_SECONDS)
        faults = validate(problem, smallest, smallest.peak_bytes)
        assert not faults, faults
        return dataclasses.replace(smallest, fits=smallest.peak_bytes <= limit)

    def _try(self, options: Sequence[Option]) -> Trial | None:
        """The trial with `options`; None, with the technique that is to blame refused from now on, if the workload does not run with them."""
        try:
            return self.bench.trial(options)
        except (ApplyError, CaptureError) as error:
            self.refuse(options, error)
            return None

    def refuse(self, options: Sequence[Option], error: ApplyError | CaptureError) -> None:
        names = list(dict.fromkeys(option.technique for option in options))
        if isinstance(error, ApplyError) and error.technique in names:
            reason = str(error).removeprefix(f"{error.technique}: ")
            for place in self._all_alike(error.technique, error.places, options):
                self._refused_places[error.technique, place] = reason
            if not error.places:
                self.refused[error.technique] = reason
            return
        for name in names:
            if len(names) > 1:
                try:
                    self.bench.trial([option for option in options if option.technique == name])
                except (ApplyError, CaptureError) as own:
                    self.refused[name] = str(own)
            else:
                self.refused[name] = str(error)
        if not any(name in self.refused for name in names):
            self.refused[names[-1]] = str(error)

    def _all_alike(self, technique: str, places: Sequence[str], options: Sequence[Option]) -> list[str]:
        """The refused `places` of some chosen `options`; once one of its kind was refused before, all places that are alike, so that a model of
        many blocks does not need a trace for each."""
        own = [option for option in options if option.technique == technique]
        meant = [o for o in own if o.where in places] or [o for o in own if modules_of(o) & set(places)]
        alike = {option.alike for option in meant if option.alike}
        again = alike & self._refused_kinds
        self._refused_kinds |= alike
        offered = [o for (name, _), (_, found) in self._offered.items() if name == technique for o in found]
        return list(dict.fromkeys([*places, *(o.where for o in (*meant, *(o for o in offered if o.alike in again)))]))

    def _with_best_settings(self, trial: Trial, settings: Iterable[str], *, only_free: bool = False) -> Trial:
        """The trial with the user's settings, if it fits with them; else with what the techniques `settings` do to the allocator: the fastest
        that fits, or what holds least. `only_free`: with those that take no time."""
        if self._fits(trial):
            return trial
        options = [o for name in sorted(settings) for o in self._offers(name, trial.tape)]
        others = self._with_all_settings(trial, [o for o in options if not (only_free and o.seconds > 0)])
        return min(others, key=lambda t: (not self._fits(t), t.seconds if self._fits(t) else 0.0, t.high_bytes))

    def _with_all_settings(self, trial: Trial, options: Iterable[Option]) -> list[Trial]:
        """The trial as it is, and with each of those `options` that are the allocator's."""
        return [trial, *(self.bench.with_settings(trial, option) for option in options if option.is_of_the_allocator)]

    def _better(self, one: Made | None, other: Made | None) -> Made | None:
        if one is None or other is None:
            return one or other
        ranks = [
            (0, r[0].seconds, r[0].high_bytes) if self._fits(r[0]) else (1, r[0].high_bytes, r[0].seconds)
            for r in (one, other)
        ]
        return one if ranks[0] <= ranks[1] else other


def _nothing_more(variant: Variant) -> Solution:
    """The choice of none of a variant's options."""
    peak = variant.problem.peak_bytes(())
    return Solution(chosen=(), fits=True, seconds=0.0, peak_bytes=peak, bound_seconds=0.0, is_proven=False)


def _seconds(bundle: Iterable[Option]) -> float:
    return sum(option.seconds for option in bundle)


def _kind(option: Option) -> tuple[str, str]:
    """What the options of a bundle share: the technique and the settings."""
    return option.technique, repr(sorted(option.settings.items()))


def _saved(bundle: Iterable[Option]) -> int:
    """At most what a bundle takes from any moment."""
    return sum(max((-change.num_bytes for change in option.changes), default=0) for option in bundle)


def _compatible(bundles: Iterable[Sequence[Option]]) -> list[Sequence[Option]]:
    """The bundles in order, without those that share a slot with an earlier one."""
    taken: set[str] = set()
    chosen = []
    for bundle in bundles:
        slots = {slot for option in bundle for slot in option.slots}
        if not taken & slots:
            chosen.append(bundle)
            taken |= slots
    return chosen


def _keys(options: Iterable[Option]) -> list[str]:
    return [option.key for option in options]
