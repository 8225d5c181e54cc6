"""The grid: every workload under budgets from most of the plain peak down to the lowest reachable one, and the requirements for each plan."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.plans.baselines import Baseline, baselines
from benchmarks.plans.bench import bench_of
from benchmarks.plans.workloads import Workload
from tightfit.fit.searching.allowed import Allowed
from tightfit.fit.searching.search import Found, Search
from tightfit.planner.option import Option

SHARES = (0.9, 0.6, 0.4)
# Seconds of two plans that differ by less are the same: what floating point makes of sums in another order.
_SAME = 1e-6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One budget of a workload (`kind` is "plan"), or one simple remedy ("baseline", without a budget).

    `high_bytes` is the upper end of the traced run's peak, `seconds` its time per step; `wrong` names the requirements that are not met.
    """

    workload: str
    device: str
    kind: str
    name: str
    budget_bytes: int
    fits: bool
    device_bytes: int
    high_bytes: int
    seconds: float
    plain_bytes: int
    plain_seconds: float
    baseline: str
    baseline_seconds: float
    choices: str
    num_traced: int
    elapsed_seconds: float
    wrong: str


def rows_of(workload: Workload, folder: Path | None, shares: Sequence[float] = SHARES) -> Iterator[Row]:
    """The rows of one workload: its baselines, then its plans, the largest budget first."""
    bench = bench_of(workload, folder)
    plain = bench.run_with(())
    simple = []
    for baseline in baselines(workload, bench, folder):
        simple.append(baseline)
        yield _baseline_row(workload, baseline, plain.high_bytes, plain.seconds)
    allowed = Allowed(names=frozenset(workload.allow))
    before: Row | None = None
    min_bytes = Search(bench, 0, allowed).run().best.high_bytes
    budgets = [(f"{share:.0%}", int(share * plain.high_bytes)) for share in shares]
    reachable = min([min_bytes, *(b.high_bytes for b in simple if not b.why_not)])
    within = [("least", min_bytes), *((name, budget) for name, budget in budgets if budget >= reachable)]
    for name, budget in sorted(within, key=lambda pair: -pair[1]):
        started, traced = time.monotonic(), bench.num_traced
        found = Search(bench, budget, allowed).run()
        row = dataclasses.replace(
            _plan_row(workload, found, simple, name, budget),
            num_traced=bench.num_traced - traced,
            elapsed_seconds=round(time.monotonic() - started, 1),
        )
        row = dataclasses.replace(row, wrong="; ".join(_faults(row, before, simple)))
        before = row if row.fits else before
        yield row


def _baseline_row(workload: Workload, baseline: Baseline, plain_bytes: int, plain_seconds: float) -> Row:
    return Row(
        workload=workload.name,
        device=workload.device,
        kind="baseline",
        name=baseline.name,
        budget_bytes=0,
        fits=not baseline.why_not,
        device_bytes=baseline.device_bytes,
        high_bytes=baseline.high_bytes,
        seconds=baseline.seconds,
        plain_bytes=plain_bytes,
        plain_seconds=plain_seconds,
        baseline="",
        baseline_seconds=0.0,
        choices="",
        num_traced=0,
        elapsed_seconds=0.0,
        wrong=baseline.why_not,
    )


def _plan_row(workload: Workload, found: Found, simple: Sequence[Baseline], name: str, budget_bytes: int) -> Row:
    fitting = [b for b in simple if not b.why_not and b.high_bytes <= budget_bytes]
    best = min(fitting, key=lambda b: b.seconds, default=None)
    return Row(
        workload=workload.name,
        device=workload.device,
        kind="plan",
        name=name,
        budget_bytes=budget_bytes,
        fits=found.fits,
        device_bytes=found.best.estimate.peak.device_bytes,
        high_bytes=found.best.high_bytes,
        seconds=found.best.seconds,
        plain_bytes=found.base.high_bytes,
        plain_seconds=found.base.seconds,
        baseline="" if best is None else best.name,
        baseline_seconds=0.0 if best is None else best.seconds,
        choices=summary(found.best.all_options()),
        num_traced=0,
        elapsed_seconds=0.0,
        wrong="",
    )


def summary(options: Sequence[Option]) -> str:
    """Each technique with the number of places where it was chosen."""
    names = [option.technique for option in options]
    return " + ".join(f"{names.count(n)} {n}" if names.count(n) > 1 else n for n in dict.fromkeys(names))


def _faults(row: Row, before: Row | None, simple: Sequence[Baseline] = ()) -> Iterator[str]:
    """The requirements that a plan misses. `before` is the plan for the next larger budget, `simple` are the baselines."""
    if row.name == "least":
        yield from (f"{b.name} holds less" for b in simple if not b.why_not and b.high_bytes < row.high_bytes)
    if not row.fits:
        yield "does not fit"
    elif row.high_bytes > row.budget_bytes:
        yield "said to fit and does not"
    if before is not None and before.fits and row.fits:
        if row.high_bytes > before.high_bytes:
            yield "holds more than with a larger budget"
        if row.seconds < before.seconds - _SAME:
            yield f"{1 - row.seconds / before.seconds:.1%} faster than with a larger budget"
    if row.fits and row.baseline and row.seconds > row.baseline_seconds + _SAME:
        yield f"{row.seconds / row.baseline_seconds - 1:.1%} slower than {row.baseline}"
