"""`plan`: the wiring from a workload and a card to a `Plan`."""

import dataclasses
import difflib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tightfit.capture.processes.containment.policy import Policy
from tightfit.capture.targets.target_files import words_for_target
from tightfit.capture.targets.target_kinds import parse_target
from tightfit.capture.trace import Preparation, trace
from tightfit.capture.trace_settings import DEFAULT_NUM_STEPS, DEFAULT_TIMEOUT_SECONDS, Steps, TraceSettings
from tightfit.devices.catalogue import find
from tightfit.devices.device import Device
from tightfit.diagnosis.suggestions.from_profile import PlannedWorkload, suggestions_for
from tightfit.errors import ApplyError, UsageError
from tightfit.errors.faults import answering, theirs
from tightfit.fit import cost
from tightfit.fit.available import Used, with_note
from tightfit.fit.card_settings import CardSettings, allocator_settings
from tightfit.fit.only_large import found_for_largest_batch
from tightfit.fit.planning_progress import OnProgress, ProgressLog
from tightfit.fit.proof import DEFAULT_SECONDS, Prover
from tightfit.fit.searching.allowed import Allowed, Without
from tightfit.fit.searching.curves import Curves
from tightfit.fit.searching.ranking import is_surely_slower
from tightfit.fit.searching.search import Found, Search
from tightfit.fit.traced_runs import TracedRun, TracedRuns
from tightfit.planner import plan as plain
from tightfit.planner.option import Option
from tightfit.planner.plan import Alternative, Bound, Choice, Proof
from tightfit.planner.problem import parts_of
from tightfit.reports.plans import Plan
from tightfit.reports.results import Estimate
from tightfit.techniques.recomputation.only_above import SETTING
from tightfit.techniques.registry import techniques
from tightfit.units import format_bytes_up, to_bytes


@answering("the planner")
def plan(
    target: str | os.PathLike[str],
    device: str,
    *,
    budget: str | int | None = None,
    host: str | int | None = None,
    disk: str | int | None = None,
    allow: Iterable[str] = (),
    without: Iterable[str] = (),
    arguments: Sequence[str] = (),
    parameters: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    steps: Steps = DEFAULT_NUM_STEPS,
    until: str | int | None = None,
    timeout: float = DEFAULT_TIMEOUT_SECONDS,
    largest_batch: bool = False,
    alloc_conf: str | None = None,
    margin: str | int = "safe",
    calibration: str | os.PathLike[str] | None = None,
    show_output: bool = False,
    prove: bool = True,
    allow_writes: bool = False,
    allow_network: bool = False,
    say: Callable[[str], None] | None = None,
    used: Used = None,
    on_progress: OnProgress | None = None,
) -> Plan:
    """The fastest combination of techniques with which `target` fits `device`, or `budget` on it ("22GiB", "80%" of it, or bytes).

    `allow` names lossy techniques that may be taken, or is `("lossy",)` for all of them; `without` names what is left out, a technique or a
    technique at places ("checkpointing@GPT.h.3,GPT.h.4", "tiled_tokens@GPT.h.*"). `host` is the memory of the host that techniques may use, as page-locked
    memory beside what the program itself holds there, and `disk` the space on disk; none if it is not given. With `prove`, three steps are run on the host, plain and planned, where that takes 20 s at
    most. `margin` says which end of a peak's range has to fit: "safe" (the upper one), "likely"
    (the likely peak) or 0 (the lower one), `used` what other processes hold on the card. The other parameters are those of `tightfit.estimate`; `say` is told what is being done,
    and `on_progress` has more of it (`tightfit.fit.planning_progress.Progress`). Interrupted (Ctrl-C), it returns the best plan so far, whose `is_interrupted`
    is true; a second interrupt is raised.

    Raises:
        UsageError: no such target, device, technique or setting, or one that nothing uses.
        CaptureError: the plain workload could not be traced.
        InternalError: a fault of tightfit itself, on the way.
        KeyboardInterrupt: interrupted before anything better than the plain run was found.
    """
    made = planner(
        words_for_target(target),
        device,
        budget=budget,
        host=host,
        disk=disk,
        allow=allow,
        without=without,
        arguments=arguments,
        parameters=parameters,
        options=options,
        steps=steps,
        until=until,
        timeout=timeout,
        largest_batch=largest_batch,
        alloc_conf=alloc_conf,
        margin=margin,
        calibration=calibration,
        show_output=show_output,
        prove=prove,
        allow_writes=allow_writes,
        allow_network=allow_network,
        say=say,
        used=used,
        on_progress=on_progress,
    )
    return made.within(made.budget_bytes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Plans of one workload for one card: what was traced for one is not traced again for the next. `budget_bytes` is what the caller has asked for."""

    runs: TracedRuns
    budget_bytes: int
    allowed: Allowed
    host_bytes: int
    disk_bytes: int
    prove: bool

    def within(self, budget_bytes: int) -> Plan:
        """The fastest plan within so many bytes, or the one that holds least."""
        limit_bytes, on = self.runs.within(budget_bytes), self.runs.on
        search = Search(self.runs, limit_bytes, self.allowed, host_bytes=self.host_bytes, disk_bytes=self.disk_bytes)
        plan = _proven(search, self.runs, self.runs.card, prove=self.prove)
        plan = dataclasses.replace(plan, assumptions=(*plan.assumptions, *search.offers.notes))
        return with_note(plan, on.empty, on.used_bytes)


def planner(
    target: str,
    device: str,
    *,
    budget: str | int | None = None,
    host: str | int | None = None,
    disk: str | int | None = None,
    allow: Iterable[str] = (),
    without: Iterable[str] = (),
    arguments: Sequence[str] = (),
    parameters: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    steps: Steps = DEFAULT_NUM_STEPS,
    until: str | int | None = None,
    timeout: float = DEFAULT_TIMEOUT_SECONDS,
    largest_batch: bool = False,
    alloc_conf: str | None = None,
    margin: str | int = "safe",
    calibration: str | os.PathLike[str] | None = None,
    show_output: bool = False,
    prove: bool = True,
    allow_writes: bool = False,
    allow_network: bool = False,
    say: Callable[[str], None] | None = None,
    used: Used = None,
    on_progress: OnProgress | None = None,
) -> Planner:
    """What `plan` plans with; the parameters are those of `plan`."""
    on = CardSettings.of(device, alloc_conf=alloc_conf, calibration=calibration, used=used, margin=margin)
    budget_bytes = min(on.budget_bytes(budget), on.card.capacity_bytes)
    runs = TracedRuns(
        target=parse_target(target, arguments=arguments, parameters=parameters, options=options),
        label=target,
        on=on,
        tracing=TraceSettings(
            steps=steps,
            until=None if until is None else str(until),
            timeout=timeout,
            largest_batch=largest_batch,
            show_output=show_output,
            allow_writes=allow_writes,
            allow_network=allow_network,
        ),
        log=ProgressLog(say=say and theirs(say), on_progress=on_progress and theirs(on_progress)),
    )
    if host is not None and find(device).shares_host_memory:
        raise UsageError(
            f"--host: {find(device).name} has the host's memory, so that nothing is gained by offload to it; leave it out"
        )
    return Planner(
        runs=runs,
        budget_bytes=budget_bytes,
        allowed=allowed(allow, without),
        host_bytes=0 if host is None else to_bytes(host, "host"),
        disk_bytes=0 if disk is None else to_bytes(disk, "disk"),
        prove=prove,
    )


def _proven(search: Search, runs: TracedRuns, card: Device, *, prove: bool) -> Plan:
    """The plan that a search finds, with its proof; made again without the techniques whose values are others."""
    prover: Prover | None = None
    while True:
        found, only_large = found_for_largest_batch(search, runs)
        plan = _plan(found, search.candidates.curves, runs, card, search.budget_bytes)
        # Batches that are left alone prove nothing: what is proved is recomputed always.
        said = plan if only_large is None else only_large.said_in(plan)
        if not (prove and plan.fits and plan.choices) or plan.is_interrupted:
            return said
        prover = prover or Prover(
            runs.target,
            found.base.tape,
            device=runs.on.name,
            seconds=DEFAULT_SECONDS,
            log=runs.log,
            policy=runs.policy,
        )
        try:
            proof = prover.prove(plan.choices)
        except ApplyError as error:
            search.offers.refuse(found.best.options, error)
            continue
        except KeyboardInterrupt:
            proof = Proof(kind="structure", what="not by values: that was interrupted")
            return dataclasses.replace(said, proof=proof, is_interrupted=True)
        if isinstance(proof, Proof):
            begin_later = [
                c for c in plan.choices if (c.technique, c.where) not in search.offers.places(found.base.profile)
            ]
            return dataclasses.replace(said, proof=_of_all(proof, begin_later))
        for mismatch in proof:
            search.offers.refusals.techniques[mismatch.technique] = (
                f"its results on the host differ from those of the plain run: {mismatch.what}"
            )


def _of_all(proof: Proof, begin_later: Sequence[Choice]) -> Proof:
    """The proof of a plan, of which the values of the first steps say nothing about the choices that `begin_later`."""
    if proof.kind != "values" or not begin_later:
        return proof
    first = f"{begin_later[0].technique} of {begin_later[0].where}"
    return Proof(
        kind="structure", what=f"not verified by values: {first} changes nothing in the first {proof.steps} steps"
    )


def allowed(names: Iterable[str], without: Iterable[str] = ()) -> Allowed:
    """What the words after `--allow` permit, and those after `--without` leave out.

    Raises:
        UsageError: one is no technique.
    """
    # From Python a single word is natural: allow="lossy".
    names, without = ([each] if isinstance(each, str) else list(each) for each in (names, without))
    words = {word.replace("-", "_") for name in names for word in name.split(",") if word}
    unknown = words - set(techniques()) - {"lossy"}
    if unknown:
        raise UsageError(
            f"--allow {', '.join(sorted(unknown))}: no such technique{_nearest(unknown)}; allow lossy (all of them) or one of "
            + ", ".join(_lossy_names())
        )
    return Allowed(
        all_lossy="lossy" in words,
        names=frozenset(words - {"lossy"}),
        without=tuple(_without(each) for text in without for each in ([text] if "@" in text else text.split(","))),
    )


def _lossy_names() -> list[str]:
    """What can be allowed: the lossy techniques, and the exact ones with options that are lossy on some programs, with the reason."""
    where = {name: f" (lossy where {t.lossy_where})" if t.lossy_where else "" for name, t in techniques().items()}
    return sorted(f"{name}{where[name]}" for name, t in techniques().items() if where[name] or not t.exact)


def _nearest(words: Iterable[str]) -> str:
    """The techniques that are spelled most like `words`, as a question; empty where none is near."""
    near = [name for word in words for name in difflib.get_close_matches(word, techniques(), n=1)]
    return f" (did you mean {', '.join(near)}?)" if near else ""


def _without(text: str) -> Without:
    name, at, places = text.partition("@")
    name = name.replace("-", "_")
    found = tuple(place for place in places.split(",") if place)
    if name not in techniques() or bool(at) is not bool(found):
        raise UsageError(
            f"--without {text}{_nearest({name} - set(techniques()))}: write TECHNIQUE or TECHNIQUE@PLACE,PLACE, such as checkpointing@GPT.h.3; the techniques: "
            + ", ".join(sorted(techniques()))
        )
    return Without(technique=name, places=found)


def _plan(found: Found, curves: Curves, runs: TracedRuns, card: Device, budget_bytes: int) -> Plan:
    best, base = found.best, found.base
    taken, seconds = best.all_options(), _seconds_of_each(found)
    return Plan(
        target=runs.label,
        device=card.name,
        capacity_bytes=card.capacity_bytes,
        budget_bytes=budget_bytes,
        headroom_bytes=max(0, best.needed_bytes - best.estimate.peak.device_bytes),
        fits=found.fits,
        run=best.run,
        baseline=base.run,
        promised_bytes=_promised(found),
        choices=tuple(_choice(found, option, seconds.get(option.key, option.seconds)) for option in taken),
        bound=_bound(found),
        alternatives=tuple(_alternatives(found, runs, budget_bytes)),
        # Whoever interrupts does not wait for a curve.
        frontier=curves.of(found.variant) if found.variant is not None and not found.is_interrupted else (),
        advice=suggestions_for(_planned(found, runs), card, is_whole_card=budget_bytes == card.capacity_bytes),
        model={"roots": [dict(root) for root in best.roots]},
        host_bytes=sum(option.host_bytes for option in taken),
        # What the traced run held: the file is of whole pages.
        disk_bytes=best.tape.disk_peak_bytes or sum(option.disk_bytes for option in taken),
        versions=base.tape.versions,
        assumptions=best.estimate.assumptions,
        coverage=best.tape.coverage,
        is_interrupted=found.is_interrupted,
        predicted_seconds=_predicted_seconds(found),
        margin=best.margin,
        uncertainty=tuple(band.cause for band in best.estimate.band if band.more_bytes),
    )


def _planned(found: Found, runs: TracedRuns) -> PlannedWorkload:
    return PlannedWorkload(
        profile=found.base.profile,
        estimate=found.base.estimate,
        roots=found.base.roots,
        needed_bytes=found.base.needed_bytes,
        planned_bytes=found.best.needed_bytes,
        fits=found.fits,
        techniques=frozenset(option.technique for option in found.best.options),
        forbidden=found.forbidden,
        saved_without_gradients=runs.saved_without_gradients or 0,
    )


def _promised(found: Found) -> int:
    """The device bytes that the solver counted on."""
    if found.variant is None or found.solution is None:
        return found.best.estimate.peak.device_bytes
    gap = found.best.estimate.peak.device_bytes - found.best.estimate.peak.allocated_bytes
    return found.solution.peak_bytes + gap


def _predicted_seconds(found: Found) -> float:
    """Seconds of a step as the options predict them, with what the settings of the allocator take."""
    option = found.best.settings_option
    if found.variant is None or found.solution is None:
        return found.best.seconds
    return found.variant.run.seconds + found.solution.seconds + (0.0 if option is None else option.seconds)


def _seconds_of_each(found: Found) -> dict[str, float]:
    """By the key of each option that a solver chose, its part of what they add together."""
    if found.variant is None or found.solution is None:
        return {}
    problem = found.variant.problem
    chosen = [problem.options[i] for i in found.solution.chosen]
    return dict(zip((option.key for option in chosen), parts_of(problem.step, chosen), strict=True))


def _choice(found: Found, option: Option, seconds: float) -> Choice:
    return Choice(
        technique=option.technique,
        where=option.where,
        settings=dict(option.settings),
        saves_bytes=_saved_at_peak(found, option),
        adds_seconds=seconds,
        exact=option.exact,
    )


def _saved_at_peak(found: Found, option: Option) -> int:
    """What the option alone takes from the highest moment of the run that it was worked out for."""
    variant = found.variant
    tape_peak = int(variant.problem.events[variant.problem.base_bytes.argmax()]) if variant is not None else 0
    return -sum(c.num_bytes for c in option.changes if c.begin <= tape_peak < c.end)


def _bound(found: Found) -> Bound:
    if found.solution is None or found.variant is None:
        return Bound(seconds_per_step=found.best.seconds, is_proven=True)
    seconds = found.variant.run.seconds + found.solution.bound_seconds
    return Bound(seconds_per_step=min(seconds, found.best.seconds), is_proven=found.solution.is_proven)


def _alternatives(found: Found, runs: TracedRuns, budget_bytes: int) -> Iterable[Alternative]:
    """The plain run, other combinations that fit but are slower, the simple baseline, and what could not be put on this workload."""
    refused = {name for name, _ in found.refused}
    for trial in runs.all():
        fits = trial.needed_bytes <= budget_bytes
        if trial.options == found.best.options or (trial.options and not fits):
            continue
        # Traced before the proof by values refused a technique of theirs, or the same as another but for small batches.
        if any(option.technique in refused or SETTING in option.settings for option in trial.options):
            continue
        names = list(dict.fromkeys(option.technique for option in trial.options))
        excess = f"{format_bytes_up(trial.needed_bytes - budget_bytes)} over the budget"
        if trial.estimate.peak.device_bytes <= budget_bytes:
            excess += " with the safety margin"
        yield Alternative(
            name=" + ".join(names) if names else "no changes",
            device_bytes=trial.estimate.peak.device_bytes,
            seconds_per_step=trial.seconds,
            fits=fits,
            exact=all(option.exact for option in trial.options),
            why=_why_not(trial, found.best) if fits else excess,
        )
    full = _full_checkpointing(found)
    if full is not None:
        yield full
    for name, reason in found.not_offered:
        yield Alternative(
            name=name, device_bytes=None, seconds_per_step=None, fits=None, exact=True, why=f"not offered: {reason}"
        )
    for name, reason in found.refused:
        yield Alternative(
            name=name, device_bytes=None, seconds_per_step=None, fits=None, exact=True, why=f"refused: {reason}"
        )


def _why_not(trial: TracedRun, best: TracedRun) -> str:
    """Why a run that fits was not taken: it is slower, or cannot be told to be faster."""
    if is_surely_slower(trial, best):
        return "fits, but is slower"
    return "fits; the times cannot be told apart"


def _full_checkpointing(found: Found) -> Alternative | None:
    """The simple baseline: every block that repeats is run twice, as a framework's switch would have it; predicted, not verified."""
    variant = found.variant
    if variant is None:
        return None
    options = variant.problem.options
    blocks = [
        i for i, o in enumerate(options) if o.technique == "checkpointing" and o.where.rpartition(".")[2].isdigit()
    ]
    # One that has no others beside it repeats nothing: the first part of a pipeline, whose layers are inside of it.
    lists = Counter(options[i].where.rpartition(".")[0] for i in blocks)
    blocks = [i for i in blocks if lists[options[i].where.rpartition(".")[0]] > 1]
    outermost = [i for i in blocks if not any(options[i].slots < options[j].slots for j in blocks)]
    if not outermost:
        return None
    # The likely peak, as those of the traced runs beside it: what the margin asks for beyond it is in the variant's gap.
    margin_bytes = found.best.needed_bytes - found.best.estimate.peak.device_bytes
    device_bytes = variant.problem.peak_bytes(outermost) + variant.gap_bytes - margin_bytes
    # The lowest peak was searched for among choices that this one belongs to, and was traced: a lower prediction is too low.
    is_too_low = not found.fits and device_bytes < found.best.estimate.peak.device_bytes
    return Alternative(
        name="checkpointing of every block",
        device_bytes=None if is_too_low else device_bytes,
        seconds_per_step=variant.run.seconds + variant.problem.seconds_of(outermost),
        fits=None,
        exact=True,
        why="not verified: predicted below the lowest peak that a trace has reached"
        if is_too_low
        else "predicted, not verified",
    )


@answering("the planner")
def run_virtually(
    plan: plain.Plan,
    script: str,
    arguments: Sequence[str] = (),
    *,
    allow_writes: bool = False,
    allow_network: bool = False,
) -> tuple[Estimate, list[str], list[str]]:
    """The first steps of `script` with `plan` on it, on the virtual card of the plan: what they hold, the models that were met, and warnings.

    Raises:
        ApplyError: the plan is for another model.
        CaptureError: the script could not be traced.
    """
    traced = trace(
        parse_target(script, arguments=arguments),
        label=script,
        device=plan.device,
        policy=Policy(allow_writes=allow_writes, allow_network=allow_network),
        preparation=Preparation(
            function="tightfit.runtime.run_script:prepare",
            argument={"choices": [dataclasses.asdict(c) for c in plan.choices], "roots": plan.model.get("roots", ())},
        ),
    )
    alloc_conf = next((c.settings["alloc_conf"] for c in plan.choices if "alloc_conf" in c.settings), None)
    estimate = cost(traced.tape, find(plan.device), allocator_settings(alloc_conf))
    return estimate, [root["class"] for root in traced.report["roots"]], list(traced.report["told"])
