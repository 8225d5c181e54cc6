"""The largest batch that fits a card, without techniques and with a plan, and the one that is fastest per sample.

What a run holds is nearly affine in its batch, so a line through two traces points at the answer; more traces close in on it from both sides.
Every figure is a trace's. The number of traces is bounded, so the answer has two ends: a size that fits, and one that was found not to.
"""

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tightfit.capture.targets.script_options import option_of, value_of, with_option
from tightfit.capture.targets.target_kinds import GeneratorFunction, HuggingFaceConfig, Target, parse_target
from tightfit.capture.trace_settings import AS_USUAL, TraceSettings
from tightfit.errors import CaptureError, UsageError
from tightfit.errors.faults import answering, theirs
from tightfit.fit.available import Used
from tightfit.fit.card_settings import CardSettings
from tightfit.fit.planning import allowed
from tightfit.fit.planning_progress import OnProgress, ProgressLog
from tightfit.fit.searching.search import Found, Search
from tightfit.fit.traced_runs import TracedRuns
from tightfit.planner.largest_batch_size import CLOSE_ENOUGH, BatchSize, BatchSizes, close_in, fastest
from tightfit.planner.option import Option

FIRST_SIZE = 8
"""Where nothing says what the batch is now."""

MAX_TRACES = 8
MAX_PLANS = 3
# Neighbours that are closer than this are not told apart: the uncertainty of a peak is larger.
_CLOSE_ENOUGH_PLANNED = 0.1
# A size is given up after so many times the seconds that another one took, which grow with the data that is read; and never sooner than that.
_PATIENCE = 5.0
_LEAST_PATIENCE_SECONDS = 20.0
# Sizes this far apart that need the same to the byte are not used by the program. A batch of one number each shows within it (blocks are of 512 bytes).
_UNUSED_RATIO = 64


@answering("the search for a batch size")
def batch_sizes(
    target: str,
    device: str,
    *,
    parameter: str = "batch_size",
    budget: str | int | None = None,
    allow: Iterable[str] = (),
    without: Iterable[str] = (),
    arguments: Sequence[str] = (),
    parameters: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    tracing: TraceSettings = AS_USUAL,
    alloc_conf: str | None = None,
    margin: str | int = "safe",
    calibration: str | os.PathLike[str] | None = None,
    say: Callable[[str], None] | None = None,
    used: Used = None,
    on_progress: OnProgress | None = None,
) -> BatchSizes:
    """The largest and the fastest size of the batch of `target` on `device`, plain and with a plan.

    `parameter` is what sets the size: a keyword argument of the generator function, one of the script's own options (`batch_size` stands for
    `--batch_size N`), or `batch_size` of a Hugging Face config. The rest is as `tightfit.fit.planning.plan` has it.

    Raises:
        UsageError: no such target, device, technique or setting, or the batch of this target is not set that way.
        CaptureError: the workload could not be traced with any size that was tried.
    """
    on = CardSettings.of(device, alloc_conf=alloc_conf, calibration=calibration, used=used, margin=margin)
    parsed = parse_target(target, arguments=arguments, parameters=parameters, options=options)
    first = size_now(parsed, parameter)
    log = ProgressLog(say=say and theirs(say), on_progress=on_progress and theirs(on_progress))

    def bench(size: int) -> TracedRuns:
        return TracedRuns(
            target=with_size(parsed, parameter, size),
            label=target,
            on=on,
            tracing=dataclasses.replace(tracing, timeout=min(tracing.timeout, plain.patience(size))),
            log=log,
            subject=f"{parameter} {size}: ",
        )

    budget_bytes = min(on.budget_bytes(budget), on.card.capacity_bytes)
    plain = _Plain(bench, budget_bytes, target=target, parameter=parameter)
    planned = _Planned(plain, allowed(allow, without))
    ends, is_interrupted = _closed_in(first, plain, planned)
    answer = {"target": target, "device": on.card.name, "parameter": parameter, "is_interrupted": is_interrupted}
    return _answer(plain, planned, ends, answer)


def _answer(plain: "_Plain", planned: "_Planned", ends: "_Ends", answer: dict[str, Any]) -> BatchSizes:
    tried = [*plain.rows.values(), *planned.rows.values()]
    if answer["is_interrupted"] and not tried:
        raise KeyboardInterrupt
    if not tried:
        raise plain.fault or CaptureError(f"{answer['target']} could not be traced")
    return BatchSizes(
        **answer,
        budget_bytes=plain.budget_bytes,
        plain=plain.rows.get(ends.plain),
        plain_too_large=ends.plain_too_large,
        planned=planned.rows.get(ends.planned),
        planned_too_large=ends.planned_too_large,
        fastest=fastest(tried),
        tried=tuple(sorted(tried, key=lambda row: (row.size, bool(row.techniques)))),
        failed=plain.failed | planned.failed,
        num_examples=plain.num_examples,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Ends:
    """The largest sizes that fit (0: none was found), and the smallest that were found not to."""

    plain: int
    plain_too_large: int | None
    planned: int
    planned_too_large: int | None


def _closed_in(first: int, plain: "_Plain", planned: "_Planned") -> tuple[_Ends, bool]:
    """The ends of both searches, and whether they were interrupted: what was traced by then is an answer, too."""

    def most() -> int | None:
        return plain.num_examples

    try:
        fits, too_large = close_in(first, plain.excess, max_tries=MAX_TRACES, close_enough=CLOSE_ENOUGH, largest=most)
        more, planned_too_large = close_in(
            max(1, 2 * fits),
            planned.excess,
            known=fits,
            max_tries=MAX_PLANS,
            close_enough=_CLOSE_ENOUGH_PLANNED,
            largest=most,
            needs_end=False,
        )
    except KeyboardInterrupt:
        ends = [_ends(rows.values()) for rows in (plain.rows, planned.rows)]
        return _Ends(
            plain=ends[0][0], plain_too_large=ends[0][1], planned=ends[1][0], planned_too_large=ends[1][1]
        ), True
    found = _Ends(plain=fits, plain_too_large=too_large, planned=more, planned_too_large=planned_too_large)
    return found, False


def _ends(rows: Iterable[BatchSize]) -> tuple[int, int | None]:
    rows = list(rows)
    fits = max((row.size for row in rows if row.fits), default=0)
    return fits, min((row.size for row in rows if not row.fits and row.size > fits), default=None)


class _Plain:
    """Sizes without techniques."""

    def __init__(self, bench: Callable[[int], TracedRuns], budget_bytes: int, *, target: str, parameter: str) -> None:
        self.budget_bytes = budget_bytes
        self._target, self._parameter = target, parameter
        self.rows: dict[int, BatchSize] = {}
        self.fault: CaptureError | None = None
        self.failed: dict[int, str] = {}
        self._bench = bench
        self._benches: dict[int, TracedRuns] = {}
        self._seconds: dict[int, float] = {}
        self._seen: dict[int, tuple[int, float]] = {}

    def bench(self, size: int) -> TracedRuns:
        """The traced runs of this size, which are kept."""
        if size not in self._benches:
            self._benches[size] = self._bench(size)
        return self._benches[size]

    @property
    def num_examples(self) -> int | None:
        """Those that a loader with batches of a size that was tried reads: no larger size has a step, or another one than that of all examples."""
        found = [bench.num_examples[size] for size, bench in self._benches.items() if size in bench.num_examples]
        return max(found, default=None)

    def patience(self, size: int) -> float:
        """Seconds to wait for a step with this size, by how long the sizes took that did run: one that reads data without end is given up early."""
        if not self._seconds:
            return math.inf
        slowest = max(seconds * max(1.0, size / known) for known, seconds in self._seconds.items())
        return max(_LEAST_PATIENCE_SECONDS, _PATIENCE * slowest)

    def excess(self, size: int) -> int | None:
        """As `close_in` has it."""
        started = time.monotonic()
        try:
            trial, budget_bytes = self.bench(size).run_with(()), self.bench(size).within(self.budget_bytes)
        except CaptureError as error:
            # A model may take no batch of this size; that is an end as well.
            self.fault = error
            self.failed[size] = str(error)
            return None
        self._seconds[size] = time.monotonic() - started
        self.rows[size] = BatchSize(
            size=size,
            device_bytes=trial.estimate.peak.device_bytes,
            device_high_bytes=trial.high_bytes,
            fits=trial.needed_bytes <= budget_bytes,
            seconds_per_step=trial.seconds,
            techniques=(),
            exact=True,
        )
        self._seen[size] = (trial.estimate.peak.allocated_bytes, trial.seconds)
        self._refuse_unused()
        return trial.needed_bytes - budget_bytes

    def _refuse_unused(self) -> None:
        """Raises an error where the size changes nothing: the program does not use what sets it, and no size that is found would be true."""
        first, last = min(self._seen), max(self._seen)
        if last >= _UNUSED_RATIO * first and len(set(self._seen.values())) == 1:
            raise UsageError(
                f"--search {self._parameter}: {first} and {last} need the same memory and time, so {self._target} does not use it; name the option that sets its batch"
            )


class _Planned:
    """Sizes with the best plan for each."""

    def __init__(self, plain: _Plain, permitted: Any) -> None:
        self.rows: dict[int, BatchSize] = {}
        self.failed: dict[int, str] = {}
        self._plain = plain
        self._permitted = permitted

    def excess(self, size: int) -> int | None:
        """As `close_in` has it."""
        try:
            runs = self._plain.bench(size)
            budget_bytes = runs.within(self._plain.budget_bytes)
            found: Found = Search(runs, budget_bytes, self._permitted, is_rough=True).run()
        except CaptureError as error:
            self.failed[size] = str(error)
            return None
        if found.is_interrupted:
            raise KeyboardInterrupt
        best = found.best
        taken: tuple[Option, ...] = best.all_options()
        self.rows[size] = BatchSize(
            size=size,
            device_bytes=best.estimate.peak.device_bytes,
            device_high_bytes=best.high_bytes,
            fits=found.fits,
            seconds_per_step=best.seconds,
            techniques=tuple(dict.fromkeys(option.technique for option in taken)),
            exact=all(option.exact for option in taken),
        )
        return best.needed_bytes - budget_bytes


def size_now(target: Target, parameter: str) -> int:
    """The size that the target is given, or else the one to begin with.

    Raises:
        UsageError: it is no number, or a config is asked for something else than its batch.
    """
    if isinstance(target, HuggingFaceConfig):
        if parameter.replace("-", "_") != "batch_size":
            raise UsageError(f"--search {parameter}: for a Hugging Face config it is batch_size that is searched")
        value = target.options.get("batch_size", 1)
    elif isinstance(target, GeneratorFunction):
        value = target.parameters.get(parameter, FIRST_SIZE)
    else:
        value = value_of(target.arguments, option_of(target, parameter)) or FIRST_SIZE
    try:
        size = int(value)
    except (TypeError, ValueError):
        raise UsageError(f"--search {parameter}: it is {value!r} now, which is no size of a batch") from None
    if size < 1:
        raise UsageError(f"--search {parameter}: it is {size} now; a batch has at least one example")
    return size


def with_size(target: Target, parameter: str, size: int) -> Target:
    """The target with a batch of that size."""
    if isinstance(target, HuggingFaceConfig):
        return dataclasses.replace(target, options={**target.options, "batch_size": size})
    if isinstance(target, GeneratorFunction):
        return dataclasses.replace(target, parameters={**target.parameters, parameter: size})
    arguments = with_option(target.arguments, option_of(target, parameter), str(size))
    return dataclasses.replace(target, arguments=tuple(arguments))
