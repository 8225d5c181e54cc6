"""Variants of a workload: a run, traced or predicted, with the problem of what else to do to it."""

import dataclasses
from collections.abc import Iterable, Sequence, Set

from tightfit.allocator.settings import AllocatorSettings
from tightfit.fit.searching.allocator_choice import AllocatorChoice
from tightfit.fit.searching.offers import Offers
from tightfit.fit.traced_runs import TracedRun, TracedRuns
from tightfit.planner import problem as problems
from tightfit.planner.option import Option
from tightfit.planner.problem import Bytes, Problem, together, total_changes
from tightfit.planner.retained import with_retained
from tightfit.planner.sides import Sides
from tightfit.simulate.estimate import BESIDE_THE_ALLOCATOR
from tightfit.simulate.timeline_bytes import replay_timeline
from tightfit.simulate.workspaces import with_workspaces_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A run with the problem of what else to do to it. `gap_bytes`: what its card needs beyond the bytes that are allocated.

    The run was traced, but for options that retain the graph (`tightfit.planner.retained`): with one of these, its figures are predictions.
    """

    run: TracedRun
    problem: Problem
    gap_bytes: int
    is_predicted: bool = False


class Variants:
    """Makes the variants of one search."""

    def __init__(
        self,
        runs: TracedRuns,
        offers: Offers,
        settings: AllocatorChoice,
        *,
        host_bytes: int = 0,
        disk_bytes: int = 0,
    ) -> None:
        self._runs = runs
        self._offers = offers
        self._settings = settings
        self._host_bytes = host_bytes
        self._disk_bytes = disk_bytes
        self._made: dict[tuple[str, ...], Variant] = {}

    def of(self, run: TracedRun, taken: Sequence[Option] = ()) -> Variant:
        """The problem of what else to do to `run` with `taken`, options that retain the graph, on it too; worked out once."""
        key = (*sorted(option.key for option in (*run.options, *taken)), "refused:", *self._offers.refusals.key)
        if key not in self._made:
            self._made[key] = self._variant(run, {option.key for option in taken})
        return self._made[key]

    def _variant(self, run: TracedRun, keys: Set[str]) -> Variant:
        fine = self._fine(self._offers.options(run.profile), run)
        if run.later is not None:
            later = self._offers.options_beside(run.later, run.profile)
            fine = _with_later_changes(fine, later, run)
            # A block that is frozen in the steps traced and trained after them has nothing to save there.
            places = self._offers.places(run.profile)
            fine += _only_later([o for o in self._fine(later, run) if (o.technique, o.where) not in places], run)
        tape = with_workspaces_of(self._runs.card, run.tape, self._runs.on.calibration)
        timeline = replay_timeline(tape, AllocatorSettings()).allocated
        if run.later is None:
            # Nothing is allocated after the steps, and no option says what it holds then: what a plain run holds would be the peak of all plans.
            timeline = timeline[: len(run.profile.tape.events)]
        # What a run caches beyond what it holds says little of another run: to begin with, no more is counted than the allocator can be made to.
        gaps = [t.needed_bytes - t.estimate.peak.allocated_bytes for t in self._settings.with_each(run)]
        variant = Variant(run=run, problem=self._problem(timeline, fine, run.profile.step), gap_bytes=min(gaps))
        retaining = [option for option in fine if option.key in keys]
        if not retaining:
            return variant
        passes = [each for option in retaining for each in option.retains]
        slots = {slot for option in retaining for slot in option.slots}
        more = together(retaining)
        step = run.profile.step + more
        beside = [with_retained(option, passes, step) for option in fine if not slots & option.slots]
        problem = self._problem(timeline + total_changes(len(timeline), retaining), beside, step)
        seconds = run.seconds + run.profile.step.added(more)
        estimate = dataclasses.replace(run.estimate, seconds_per_step=seconds)
        predicted = dataclasses.replace(run, options=(*run.options, *retaining), estimate=estimate)
        gap_bytes = gap_after(retaining, variant, problem)
        return Variant(run=predicted, problem=problem, gap_bytes=gap_bytes, is_predicted=True)

    def _problem(self, timeline: Bytes, options: Sequence[Option], step: Sides) -> Problem:
        return problems.build(timeline, options, host_bytes=self._host_bytes, disk_bytes=self._disk_bytes, step=step)

    def _fine(self, options: Iterable[Option], run: TracedRun) -> list[Option]:
        """Those that a problem of what else to do to `run` can have."""
        names = {option.technique for option in run.options}
        fine = [o for o in options if not o.needs_new_trace and not o.is_of_the_allocator and o.technique not in names]
        # Without a budget for the host these would only make the problem larger.
        return [o for o in fine if o.host_bytes <= self._host_bytes and o.disk_bytes <= self._disk_bytes]


def _with_later_changes(options: Sequence[Option], later: Sequence[Option], run: TracedRun) -> list[Option]:
    """The options with what they change after the steps too, such as in an evaluation; they take the seconds that they take in a step."""
    changes = {option.key: option.changes for option in _only_later(later, run)}
    return [dataclasses.replace(o, changes=o.changes + changes.get(o.key, ())) for o in options]


def _only_later(later: Iterable[Option], run: TracedRun) -> list[Option]:
    """The options of the whole run with what they change after its steps alone."""
    begin = len(run.profile.tape.events)
    return [
        dataclasses.replace(
            option,
            changes=tuple(
                dataclasses.replace(change, begin=max(begin, change.begin))
                for change in option.changes
                if change.end > begin
            ),
        )
        for option in later
    ]


def gap_after(taken: Sequence[Option], variant: Variant, left: Problem) -> int:
    """What a card needs beyond the bytes that are allocated once `taken` is on `variant`, whose problem is then `left`."""
    if not taken:
        return variant.gap_bytes
    peak_bytes = left.peak_bytes(())
    return needed_at(peak_bytes, variant) - peak_bytes


def needed_at(peak_bytes: int, variant: Variant) -> int:
    """What a card needs where options on `variant` leave a peak of `peak_bytes` allocated."""
    # What it needs beyond them comes and goes with them, but for the context.
    context = context_bytes(variant.run)
    share = peak_bytes / max(1, variant.problem.peak_bytes(()))
    return peak_bytes + context + round(share * max(0, variant.gap_bytes - context))


def context_bytes(run: TracedRun) -> int:
    """What the process holds on the card besides what its allocator has reserved, at the end of its range that has to fit: the uncertainty of a context
    does not shrink with what is allocated."""
    peak, band = run.estimate.peak, run.estimate.band
    beside = [each for each in band if each.cause in BESIDE_THE_ALLOCATOR]
    off = {"0": -sum(b.less_bytes for b in beside), "likely": 0, "safe": sum(b.more_bytes for b in beside)}[run.margin]
    return peak.device_bytes - peak.reserved_bytes + off
