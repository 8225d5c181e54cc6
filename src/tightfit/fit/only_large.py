"""Recomputation for large batches only: what a plan for the largest batch recomputes, smaller batches mostly have room for.

Without recomputation a run holds what no batch changes (weights, states, gradients) and what grows with the batch. Of batches with `n` elements that are no
longer than the largest one's, of `N`, the growing part is at most `n / N` of the largest one's: it is proportional to the number of samples, and at least so
to their length (attention by hand is quadratic). That gives the size up to which a batch fits as it is, and the traced run says whether it does.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from tightfit.errors import ApplyError, CaptureError
from tightfit.fit.searching.search import Found, Search
from tightfit.fit.traced_runs import TracedRun, TracedRuns
from tightfit.planner.option import Option
from tightfit.reports.plans import Plan
from tightfit.tape import Category, SpanKind, Tape
from tightfit.tape.allocated_bytes import allocated_bytes
from tightfit.techniques.recomputation.only_above import SETTING, TECHNIQUES, key_of

# Smaller batches are too few to be worth a plan that says more.
_LEAST_SHARE = 0.05


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OnlyLarge:
    """What a plan says of its recomputation: `settings` by choice (`key_of`), and the traced `run` with them."""

    run: TracedRun
    settings: Mapping[str, Mapping[str, object]]

    def said_in(self, plan: Plan) -> Plan:
        """The plan with these settings."""
        choices = tuple(
            dataclasses.replace(
                choice, settings=dict(self.settings.get(key_of(choice.technique, choice), choice.settings))
            )
            for choice in plan.choices
        )
        return dataclasses.replace(plan, run=self.run.run, choices=choices)


def found_for_largest_batch(search: Search, runs: TracedRuns) -> tuple[Found, OnlyLarge | None]:
    """What `search` finds, and the sizes of batches that are recomputed; None where all are, or none.

    Steps of several sizes leave other gaps in the allocator's cache: where these do not fit, a plan that holds as much less is looked for.
    """
    found = search.run()
    if not (runs.tracing.largest_batch and found.fits) or found.is_interrupted or not _recomputed(found):
        return found, None
    try:
        only = _only_large(found, runs, search.budget_bytes)
        if only is None or only.run.needed_bytes <= search.budget_bytes:
            return found, only
        excess = only.run.needed_bytes - search.budget_bytes
        smaller = search.within(found.best.needed_bytes - excess).run()
        if not smaller.fits or not _recomputed(smaller):
            return found, None
        only = _only_large(smaller, runs, search.budget_bytes)
    except (ApplyError, CaptureError):
        # What was found has been traced.
        return found, None
    except KeyboardInterrupt:
        return dataclasses.replace(found, is_interrupted=True), None
    return (found, None) if only is None or only.run.needed_bytes > search.budget_bytes else (smaller, only)


def _recomputed(found: Found) -> list[Option]:
    return [option for option in found.best.options if option.technique in TECHNIQUES]


def _only_large(found: Found, runs: TracedRuns, budget_bytes: int) -> OnlyLarge | None:
    """The largest sizes that need no recomputation, traced with what was found; None where they are too small."""
    best, recomputed = found.best, _recomputed(found)
    without = _like(best, runs, [option for option in best.options if option not in recomputed])
    # The allocator asks for segments, and a smaller batch may need one as large.
    limit = budget_bytes - runs.on.settings.large_segment_size_bytes
    share = share_that_fits(without.tape, without.needed_bytes, limit)
    if share < _LEAST_SHARE:
        return None
    told = {option.key: _told(option, best.call_sizes, share) for option in recomputed}
    run = _like(best, runs, [told.get(option.key, option) for option in best.options])
    return OnlyLarge(run=run, settings={key_of(o.technique, o): o.settings for o in told.values()})


def share_that_fits(tape: Tape, needed_bytes: int, budget_bytes: int) -> float:
    """Which part of the largest batch, whose steps are the last of `tape`, fits `budget_bytes`, where all of it needs `needed_bytes`: 0 to 1."""
    steps = np.flatnonzero(tape.spans.kind == SpanKind.STEP)
    if not len(steps):
        return 0.0
    begin, end = int(tape.spans.begin[steps[-1]]), int(tape.spans.end[steps[-1]])
    allocated = allocated_bytes(tape)
    gradients = allocated_bytes(tape, tape.storages.category == Category.GRADIENTS)
    # Gradients are there at the peak, or only in part: what is taken for fixed too much makes the share smaller.
    fixed = int(allocated[begin]) + int(gradients.max(initial=0))
    growing = int(allocated[begin : end + 1].max(initial=0)) - fixed
    if growing <= 0:
        return 0.0
    return min(1.0, max(0.0, 1.0 - (needed_bytes - budget_bytes) / growing))


def _like(best: TracedRun, runs: TracedRuns, options: list[Option]) -> TracedRun:
    """The workload with `options` on it, and the allocator's settings of `best`."""
    run = runs.run_with(options)
    return run if best.settings_option is None else runs.with_settings(run, best.settings_option)


def _told(option: Option, sizes: Mapping[str, list[int]], share: float) -> Option:
    # Each by itself: of two inputs that differ in length, one may be short and the other one as long as ever. A single number has no length.
    most = [max(1, int(share * size)) for size in sizes.get(key_of(option.technique, option), ())]
    return dataclasses.replace(option, settings={**option.settings, SETTING: most}) if most else option
