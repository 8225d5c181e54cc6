"""The only wiring: from a workload to its tape, from the tape to its estimates; and from a recording to its replay."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tightfit.allocator.settings import AllocatorSettings
from tightfit.capture.collectives.rank_traces import RankTraces
from tightfit.capture.collectives.world import World
from tightfit.capture.targets.target_files import words_for_target
from tightfit.capture.targets.target_kinds import HuggingFaceConfig, Script, parse_target
from tightfit.capture.trace import Preparation, Traced, saved_without_gradients, trace
from tightfit.capture.trace_settings import AS_USUAL, DEFAULT_NUM_STEPS, DEFAULT_TIMEOUT_SECONDS, Steps, TraceSettings
from tightfit.devices.calibration import Calibration
from tightfit.devices.catalogue import find
from tightfit.devices.device import Device
from tightfit.devices.node import Node
from tightfit.devices.nodes import node_of
from tightfit.errors import UnknownDevice, UsageError
from tightfit.errors.faults import answering, theirs
from tightfit.fit.available import Used, used_bytes_of, with_note, without_used
from tightfit.fit.card_settings import CardSettings
from tightfit.fit.card_settings import allocator_settings as allocator_settings
from tightfit.fit.card_settings import margin_named as margin_named
from tightfit.fit.differing_ranks import pipeline_of
from tightfit.fit.extent import extent_of, policy_of
from tightfit.fit.planning_progress import OnProgress, ProgressLog
from tightfit.recordings.read import read_recording
from tightfit.recordings.replayed import Replay, devices_of, limit_of, together
from tightfit.recordings.replayed import replay as replay_recording
from tightfit.reports.results import Estimate
from tightfit.runtime.leaks.found_leaks import LeakHolder
from tightfit.simulate.peak import estimate_peak
from tightfit.tape import Assumption, Tape
from tightfit.tape.allocated_bytes import allocated_bytes
from tightfit.units import format_bytes


@answering("the capture")
def capture(
    target: str,
    *,
    device: str,
    arguments: Sequence[str] = (),
    parameters: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    tracing: TraceSettings = AS_USUAL,
    meanwhile: Callable[[], None] | None = None,
    used: Used = None,
    on_progress: OnProgress | None = None,
    world: World | None = None,
    ranks: RankTraces | None = None,
) -> Tape:
    """The tape of `target` on a virtual `device`; see `tightfit.capture.targets.target_kinds` for what a target is. `world`: it is a distributed script, of which one
    rank is traced; `ranks` keeps what others send it.

    Raises:
        UsageError: no such target or device, or other processes use all of it.
        CaptureError: the workload could not be traced.
    """
    return _traced(
        target,
        device=device,
        arguments=arguments,
        parameters=parameters,
        options=options,
        tracing=tracing,
        meanwhile=meanwhile,
        used=used,
        on_progress=on_progress,
        world=world,
        ranks=ranks,
    ).tape


@answering("the capture")
def capture_with_holders(
    target: str,
    *,
    device: str,
    arguments: Sequence[str] = (),
    parameters: Sequence[str] = (),
    tracing: TraceSettings = AS_USUAL,
    on_progress: OnProgress | None = None,
) -> tuple[Tape, Mapping[int, LeakHolder]]:
    """As `capture`, with the holders of what the steps leave allocated, by the number of the storage on the tape."""
    traced = _traced(
        target,
        device=device,
        arguments=arguments,
        parameters=parameters,
        tracing=tracing,
        on_progress=on_progress,
        preparation=Preparation(function="tightfit.runtime.leaks.trace_holders:prepare", argument=None),
    )
    return traced.tape, {int(storage): LeakHolder(**fields) for storage, fields in traced.report.items()}


def _traced(
    target: str,
    *,
    device: str,
    arguments: Sequence[str],
    parameters: Sequence[str],
    options: Mapping[str, Any] | None = None,
    tracing: TraceSettings,
    meanwhile: Callable[[], None] | None = None,
    used: Used = None,
    on_progress: OnProgress | None,
    preparation: Preparation | None = None,
    world: World | None = None,
    ranks: RankTraces | None = None,
) -> Traced:
    used_bytes = used_bytes_of(find(device), used)
    parsed = parse_target(target, arguments=arguments, parameters=parameters, options=options)
    if options and not isinstance(parsed, HuggingFaceConfig):
        raise UsageError(
            f"{', '.join(options)}: only for a Hugging Face config, and {target} is your own code; "
            "a script takes its arguments after --, a function its parameters with -p name=value"
        )
    if world is not None and not isinstance(parsed, Script):
        raise UsageError(f"--gpus is for a script that torchrun starts, and {target} is none")
    extent = extent_of(parsed, tracing)
    log = ProgressLog(on_progress=on_progress and theirs(on_progress))
    log.begin("tracing", num_steps=extent.num_steps)

    def run(prepared: Preparation | None) -> Traced:
        return trace(
            parsed,
            label=target,
            device=device,
            num_steps=extent.num_steps,
            until=extent.until,
            largest_batch_from=extent.largest_batch_from,
            timeout_seconds=tracing.timeout,
            show_output=tracing.show_output,
            policy=policy_of(tracing),
            meanwhile=meanwhile and theirs(meanwhile),
            used_bytes=used_bytes,
            on_progress=log.on_trace,
            preparation=prepared,
            world=world,
            ranks=ranks,
        )

    traced = run(preparation)
    return traced if preparation is not None else _with_gradients_noted(traced, run)


def _with_gradients_noted(traced: Traced, trace_again: Callable[[Preparation], Traced]) -> Traced:
    """The trace that also says what gradients cost a program that only predicts."""
    if not traced.predicts_with_gradients:
        return traced
    saved = saved_without_gradients(traced.tape, trace_again)
    why = "models are called with gradients enabled, and no gradient is computed: what a backward pass would need is held; "
    if saved is None:
        why += "call them within `torch.no_grad()` or `torch.inference_mode()`"
    else:
        peak = int(allocated_bytes(traced.tape).max())
        why += f"within `torch.no_grad()` or `torch.inference_mode()` the peak of allocated memory would be {format_bytes(peak - saved)}, not {format_bytes(peak)}"
    note = Assumption(where="", what=why)
    return dataclasses.replace(
        traced, tape=dataclasses.replace(traced.tape, assumptions=(note, *traced.tape.assumptions))
    )


@answering("the estimate")
def estimate(
    target: str | os.PathLike[str] | Tape,
    device: str,
    *,
    arguments: Sequence[str] = (),
    parameters: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    steps: Steps = DEFAULT_NUM_STEPS,
    until: str | int | None = None,
    timeout: float = DEFAULT_TIMEOUT_SECONDS,
    largest_batch: bool = False,
    alloc_conf: str | None = None,
    margin: str | int = "likely",
    calibration: str | os.PathLike[str] | None = None,
    show_output: bool = False,
    allow_writes: bool = False,
    allow_network: bool = False,
    meanwhile: Callable[[], None] | None = None,
    used: Used = None,
    on_progress: OnProgress | None = None,
) -> Estimate:
    """What `target` needs on `device`: a workload, traced here in a child process, or a tape of one.

    `device` is a card's name or the path of its TOML file. `arguments` go to a script, `parameters` (`name=value`) to a generator
    function, `options` (such as `batch_size`) to a Hugging Face config. `alloc_conf` is a `PYTORCH_CUDA_ALLOC_CONF` string, by default
    the one in the environment. `margin` says which end of the peak's range has to fit: "safe" (the upper one), "likely" (the likely peak) or 0 (the
    lower one). After `steps` steps a script's training loops are left and what comes later is traced; "all" leaves none, and
    neither does `until`, a line (or "FILE.py:LINE") at which the trace ends. Tracing ends where no step has ended for `timeout` seconds. With `largest_batch` the last two steps have the largest batch that the program's data loaders can give. `calibration` is a file of what was measured on that card (`tightfit.devices.calibration`). `meanwhile`
    is called once while the workload is traced, `on_progress` a few times a second, with a `tightfit.fit.planning_progress.Progress`. `used` is what other
    processes hold on the card ("3GiB", "10%", or bytes). What the workload writes is dropped and it has no network, but for what `allow_writes`
    and `allow_network` allow.

    Raises:
        UsageError: no such target, device or setting, or a calibration that cannot be read or was made on another card.
        CaptureError: the workload could not be traced.
    """
    on = CardSettings.of(device, alloc_conf=alloc_conf, calibration=calibration, used=used, margin=margin)
    tracing = TraceSettings(
        steps=steps,
        until=None if until is None else str(until),
        timeout=timeout,
        largest_batch=largest_batch,
        show_output=show_output,
        allow_writes=allow_writes,
        allow_network=allow_network,
    )
    tape = (
        target
        if isinstance(target, Tape)
        else capture(
            words_for_target(target),
            device=device,
            arguments=arguments,
            parameters=parameters,
            options=options,
            tracing=tracing,
            meanwhile=meanwhile,
            used=used,
            on_progress=on_progress,
        )
    )
    return cost(tape, on.empty, on.settings, on.calibration, used=used, margin=on.margin)


@answering("the estimate")
def cost(
    tape: Tape,
    card: Device,
    settings: AllocatorSettings,
    calibration: Calibration | None = None,
    *,
    used: Used = None,
    margin: str = "likely",
    node: str | None = None,
) -> Estimate:
    """What `tape` needs on `card`, of which other processes have `used`, judged with `margin`; says so among its assumptions, and where the tape was
    traced for a card of other kernels. `node` names the kind of node that the ranks of a distributed program are on, by default the first with such cards.
    """
    used_bytes = used_bytes_of(card, used)
    kind = node_of(card, node) if tape.num_ranks > 1 else None
    left = without_used(card, used_bytes)
    found = estimate_peak(tape, left, settings, calibration, node=kind, used_bytes=used_bytes)
    assumptions = (*found.assumptions, *_other_kernels(tape, card), *_of_ranks(tape, kind))
    return with_note(Estimate.of(dataclasses.replace(found, assumptions=assumptions, margin=margin)), card, used_bytes)


@answering("the replay")
def replay(
    recording: str | os.PathLike[str],
    *,
    alloc_conf: str | None = None,
    memory: str | int | None = None,
    device: int | None = None,
) -> Replay:
    """What the recording of torch's allocator in that file would have held; see `tightfit.recordings.replayed`.

    `alloc_conf` is as in `PYTORCH_CUDA_ALLOC_CONF`, by default what was recorded. `memory` is what the allocator may hold, as `22GiB`, in
    bytes, or `80%` of the GPU if the recording says its capacity; by default without limit. `device` is the index of one; by default each that has events is replayed apart, and the figures are sums.

    Raises:
        UsageError: a wrong setting or size, or the recording has nothing of `device`.
        RecordingError: the file cannot be read.
    """
    settings = None if alloc_conf is None else AllocatorSettings.parse(alloc_conf)
    found = read_recording(recording)
    capacity_bytes = limit_of(found, memory, "memory")
    return together(
        [
            replay_recording(found, settings=settings, capacity_bytes=capacity_bytes, device=index)
            for index in devices_of(found, device)
        ]
    )


def _of_ranks(tape: Tape, node: Node | None) -> list[Assumption]:
    """What is taken to be so of the nodes and the other ranks of a distributed program."""
    if node is None:
        return []
    nodes = f"{tape.num_nodes} x {node.name}" if tape.num_nodes > 1 else node.name
    found = [f"collectives and NCCL's buffers are those of {nodes}: another one by --node"]
    if pipeline_of(tape):
        found.append("a stage is not made to wait for the others: the time per step has no pipeline bubble")
    return [Assumption(where="", what=what) for what in found]


def _other_kernels(tape: Tape, card: Device) -> list[Assumption]:
    """Says so where `tape` was traced for a card whose kernels may be others than those of `card`."""
    if tape.traced_for == card.name:
        return []
    try:
        traced_for = find(tape.traced_for)
    except UnknownDevice:
        traced_for = None
    if traced_for is not None and traced_for.compute_capability == card.compute_capability:
        return []
    return [
        Assumption(
            where=card.name,
            what=f"kernels were chosen for {tape.traced_for}, whose compute capability differs; estimate this GPU alone to be sure",
        )
    ]
