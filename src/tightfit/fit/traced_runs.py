"""Traced runs: the workload, traced with some options on it, and what that holds and takes. What is predicted is what the same code does.

Each is a capture of its own, in a child process, through `tightfit.runtime.attach`, which a real run goes through as well. A run that was
traced is not traced again.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tightfit.allocator.settings import AllocatorSettings
from tightfit.analysis.profile import Profile
from tightfit.capture.targets.target_kinds import Target
from tightfit.capture.trace import Preparation, Traced, saved_without_gradients, trace
from tightfit.capture.trace_settings import TraceSettings
from tightfit.errors import CaptureError
from tightfit.fit.card_settings import CardSettings
from tightfit.fit.extent import extent_of, policy_of
from tightfit.fit.planning_progress import ProgressLog
from tightfit.planner.option import Option
from tightfit.planner.plan import Choice, Run
from tightfit.simulate.estimate import Estimate, needed_bytes
from tightfit.simulate.peak import as_usable, estimate_peak
from tightfit.simulate.with_empty_cache import with_emptied_cache
from tightfit.tape import Coverage, Effect, Tape
from tightfit.tape.allocated_bytes import allocated_bytes

# A run is judged by what it needs, not by what is left on a card that is too small: libraries shrink their workspaces there.
_ROOMY = 4
# A plan is traced many times: what each of these traces needs besides torch.
_IMPORTS = ("tightfit.runtime.run_script", "tightfit.techniques.registry:import_ours")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TracedRun:
    """The workload with `options` on it. `settings_option` are the allocator's settings that it was replayed with, None for the user's own.

    `tape` is the whole run, `profile` that of its steps, and `later` that of the whole, None where nothing is allocated after the steps.
    `call_sizes`: see `tightfit.techniques.recomputation.only_above.CallSizes`.
    """

    options: tuple[Option, ...]
    settings_option: Option | None
    tape: Tape
    profile: Profile
    later: Profile | None
    estimate: Estimate
    roots: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...]
    margin: str
    call_sizes: Mapping[str, list[int]]

    @property
    def high_bytes(self) -> int:
        """The upper end of what the process may hold on the card; where this fits, the run does not depend on allocation retries."""
        return self.estimate.peak.device_high_bytes

    @property
    def needed_bytes(self) -> int:
        """What has to be there: the end of the range that the margin names."""
        return needed_bytes(self.estimate.peak, self.margin)

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.estimate.seconds_per_step

    @property
    def run(self) -> Run:
        """The figures, as a plan has them."""
        return Run(peak=self.estimate.peak, seconds_per_step=self.seconds)

    def all_options(self) -> tuple[Option, ...]:
        """The options, the allocator's settings among them."""
        return self.options if self.settings_option is None else (*self.options, self.settings_option)


class TracedRuns:
    """Traces one workload for one card. `log` is told what is being done, with `subject` (`batch_size 8: `) in front."""

    def __init__(
        self,
        *,
        target: Target,
        label: str,
        on: CardSettings,
        tracing: TraceSettings,
        log: ProgressLog,
        subject: str = "",
    ) -> None:
        self.on = on
        self.card = on.card
        self.label = label
        self.log = log
        self.subject = subject
        self.target = target
        self.tracing = tracing
        self.policy = policy_of(tracing)
        self._extent = extent_of(target, tracing)
        self.num_examples: Mapping[int, int] = {}
        """How many examples the loaders of the plain run read, by the size of their batches."""
        self.saved_without_gradients: int | None = None
        """The bytes that a program which predicts with gradients enabled would save without; None for other programs."""
        self._made: dict[frozenset[str], TracedRun] = {}
        self._effects: tuple[Effect, ...] = ()
        self._replayed: dict[tuple[frozenset[str], str], TracedRun] = {}

    def run_with(self, options: Iterable[Option], meanwhile: Callable[[], object] | None = None) -> TracedRun:
        """The workload with `options` on it, with the user's own settings of the allocator. `meanwhile` is called while it is traced, if it is.

        Raises:
            ApplyError: the options cannot be put on this workload.
            CaptureError: the workload does not run with them, or not at all.
        """
        options = tuple(options)
        key = frozenset(option.key for option in options)
        if key not in self._made:
            self.log.begin(self.subject + _what(options), num_steps=self._extent.num_steps)
            prepared = Preparation(
                function="tightfit.runtime.run_script:prepare",
                argument={"choices": [_plain(o) for o in options]},
                imports=_IMPORTS,
            )
            traced = self._trace(prepared, options, meanwhile)
            self.log.traced()
            self._check_end(options, traced.tape)
            # What the program does besides computing is looked at in the plain run, and holds for all.
            if not options:
                self._effects, self.num_examples = traced.tape.effects, traced.num_examples
                if traced.predicts_with_gradients:
                    self.saved_without_gradients = saved_without_gradients(traced.tape, self._trace)
            tape = dataclasses.replace(traced.tape, effects=self._effects)
            self._made[key] = self._costed(options, tape, traced.report)
        return self._made[key]

    def _trace(
        self,
        prepared: Preparation,
        options: tuple[Option, ...] = (),
        meanwhile: Callable[[], object] | None = None,
    ) -> Traced:
        return trace(
            self.target,
            label=self.label,
            device=self.on.name,
            num_steps=self._extent.num_steps,
            until=self._extent.until,
            largest_batch_from=self._extent.largest_batch_from,
            timeout_seconds=self.tracing.timeout,
            show_output=self.tracing.show_output,
            preparation=prepared,
            with_effects=not options,
            used_bytes=self.on.used_bytes,
            follows=self._followed(options),
            policy=self.policy,
            on_progress=self.log.on_trace,
            meanwhile=meanwhile,
        )

    def _followed(self, options: tuple[Option, ...]) -> Coverage | None:
        """A run with options leaves loops where the plain run did: techniques add operators, and the bound counts those."""
        plain = self._made.get(frozenset())
        return plain.tape.coverage if options and plain is not None else None

    def _check_end(self, options: tuple[Option, ...], tape: Tape) -> None:
        """Raises a `CaptureError` if what follows the steps does not run with `options` as it does without."""
        plain, stopped = self._made.get(frozenset()), tape.coverage.stopped
        if options and plain is not None and stopped and not plain.tape.coverage.stopped:
            raise CaptureError(f"{self.label} does not run to its end with {options[-1].technique}: {stopped}")

    def _costed(self, options: tuple[Option, ...], tape: Tape, report: Mapping[str, Any]) -> TracedRun:
        return TracedRun(
            options=options,
            settings_option=None,
            tape=tape,
            profile=Profile(tape.of_steps(), self.card),
            later=Profile(tape, self.card) if _allocates_later(tape) else None,
            estimate=self._estimate(tape, self.on.settings),
            roots=tuple(report["roots"]),
            notes=tuple(report["notes"]),
            margin=self.on.margin,
            call_sizes=report["call_sizes"],
        )

    def within(self, budget_bytes: int) -> int:
        """The budget, or what the program allows itself of the GPU (`torch.cuda.set_per_process_memory_fraction`) where that is less.

        Raises:
            CaptureError: the plain workload could not be traced.
        """
        on, tape = self.on, self.run_with(()).tape
        usable = as_usable(self.card, tape, on.settings, on.calibration, used_bytes=on.used_bytes)
        return min(budget_bytes, usable.capacity_bytes)

    def all(self) -> list[TracedRun]:
        """All runs that were traced, in order."""
        return list(self._made.values())

    def with_settings(self, run: TracedRun, option: Option) -> TracedRun:
        """The same run, replayed with what `option` does to the allocator, and as much slower as the option says."""
        key = frozenset(o.key for o in run.options), option.key
        if key not in self._replayed:
            settings = AllocatorSettings.parse(option.alloc_conf) if option.alloc_conf else self.on.settings
            found = self._estimate(with_emptied_cache(run.tape, option.empties_at), settings)
            found = dataclasses.replace(found, seconds_per_step=found.seconds_per_step + option.seconds)
            self._replayed[key] = dataclasses.replace(run, settings_option=option, estimate=found)
        return self._replayed[key]

    def _estimate(self, tape: Tape, settings: AllocatorSettings) -> Estimate:
        # What the program allows itself is part of the budget (`within`); here a small share of the card would make it anything but roomy.
        roomy = dataclasses.replace(self.card, capacity_bytes=_ROOMY * self.card.capacity_bytes)
        tape = dataclasses.replace(tape, memory_fraction=1.0)
        settings = dataclasses.replace(settings, per_process_memory_fraction=1.0)
        return estimate_peak(tape, roomy, settings, self.on.calibration)


def _allocates_later(tape: Tape) -> bool:
    """Whether more is allocated at any time after the steps than at their end."""
    allocated = allocated_bytes(tape)[len(tape.of_steps().events) :]
    return int(allocated.max()) > int(allocated[0])


def _what(options: Sequence[Option]) -> str:
    num_techniques = len({option.technique for option in options})
    if not options:
        return "tracing the plain run"
    return f"tracing with {num_techniques} {'technique' if num_techniques == 1 else 'techniques'}"


def _plain(option: Option) -> dict[str, Any]:
    choice = Choice(
        technique=option.technique,
        where=option.where,
        settings=dict(option.settings),
        saves_bytes=0,
        adds_seconds=option.seconds,
        exact=option.exact,
    )
    return dataclasses.asdict(choice)
