"""`tightfit estimate`: the memory of a workload on a GPU, found by running it on a virtual one.

Whatever computes is imported when the command runs, so that its `--help` is instant.
"""

import dataclasses
import json as jsonlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from tightfit.cli.arguments.options import (
    AS_KNOWN,
    AS_USUAL,
    NO_OPTIONS,
    ONE_GPU,
    SEVERAL,
    GpuOptions,
    ModelOptions,
    RankOptions,
    TraceOptions,
)
from tightfit.cli.arguments.used import used_now
from tightfit.cli.shared.early_server import begin_server
from tightfit.cli.shared.local_cards import own_card
from tightfit.cli.shared.progress import ProgressLine
from tightfit.devices.calibration import Calibration
from tightfit.devices.catalogue import find
from tightfit.devices.nodes import node_of, nodes_for
from tightfit.errors import UsageError
from tightfit.errors.missing_files import no_file
from tightfit.output_files import check_outputs
from tightfit.reports.redacted import redacted

if TYPE_CHECKING:
    from tightfit.capture.collectives.world import World
    from tightfit.devices.device import Device
    from tightfit.reports.rank_estimates import RankEstimate
    from tightfit.simulate.estimate import Estimate
    from tightfit.tape import Tape


def estimate(
    target: str,
    /,
    *arguments: Annotated[str, Parameter(show=False)],
    device: Annotated[tuple[str, ...], SEVERAL] = (),
    parameter: Annotated[tuple[str, ...], SEVERAL, Parameter(alias="-p")] = (),
    sweep: Annotated[tuple[str, ...], SEVERAL] = (),
    margin: str = "likely",
    json: bool = False,
    redact: bool = False,
    save_tape: Path | None = None,
    save_recording: Path | None = None,
    gpu: GpuOptions = AS_KNOWN,
    tracing: TraceOptions = AS_USUAL,
    model: ModelOptions = NO_OPTIONS,
    ranks: RankOptions = ONE_GPU,
) -> int:
    """Estimate the peak GPU memory and the time per step of a workload. No GPU is needed; the workload is not changed.

    Parameters
    ----------
    target
        A script, or package.module as python -m runs it (its own arguments after --); FILE.py:FUNCTION or package.module:FUNCTION, a generator function that yields once per step; a Hugging Face config.json, its folder or a model type; or a trace that --save-tape wrote.
    device
        A GPU by name ("4090", "a100-80gb") or its TOML file; repeat it to compare several. Default: the GPU of this machine.
    parameter
        NAME=VALUE, a keyword argument of the generator function; repeatable.
    sweep
        NAME=VALUE,VALUE: a row for each value, and for each combination where several are given. NAME is a parameter of the generator function, an option of the script (batch_size stands for --batch-size) or of a Hugging Face config. The exit code is the worst row's.
    margin
        Which end of the peak's range has to fit: safe (the upper end), likely (the likely peak; if not given) or 0 (the lower end).
    json
        Print JSON: one object per line, one for each GPU.
    redact
        Write ~ in place of home folders in every path, for a report that is sent to somebody.
    save_tape
        Also write the trace to this file (.npz), to estimate it again for other GPUs.
    save_recording
        Also write the run as a recording of torch's allocator, for torch's viewer and tightfit replay (.pickle; one GPU).
    """
    begin_server(target, tracing, is_one_of_many=ranks.gpus is not None)
    from tightfit import fit
    from tightfit.recordings.write import write_tape
    from tightfit.reports.rank_estimates import worst_of

    started = time.monotonic()
    devices, end = device or (own_card(arguments),), fit.margin_named(margin)
    cards, settings = [find(name) for name in devices], fit.allocator_settings(gpu.alloc_conf)
    measured = None if gpu.calibration is None else Calibration.load(gpu.calibration)
    cards = [card if measured is None else measured.applied_to(card) for card in cards]
    used = used_now(gpu.used, devices[0], is_own=not device)
    check_outputs(
        {"--save-tape": save_tape, "--save-recording": save_recording}, inputs=(target, gpu.calibration, *device)
    )
    _check_recording(save_recording, len(cards))
    asked = {"arguments": arguments, "parameters": parameter, "options": model.given()}
    how, costs = {"tracing": tracing, "used": used}, {"used": used, "margin": end, "node": ranks.node}
    world = _world(ranks, target, sweep, cards)
    if sweep:
        _check_sweep(target, save_tape, save_recording)
        pairs, shown = list(zip(devices, cards, strict=True)), {"json": json, "redact": redact}
        return _sweep(target, sweep, pairs, settings, measured, asked, {**how, "margin": end}, shown)
    traced = _tapes(target, devices[0], asked, how, world, is_chosen=ranks.rank is not None)
    tapes = [redacted(tape) if redact else tape for tape in traced]
    found = [_ranks(tapes, [fit.cost(tape, card, settings, measured, **costs) for tape in tapes]) for card in cards]
    tape, estimates = worst_of(found[0]).tape, [worst_of(of_ranks).estimate for of_ranks in found]
    elapsed_seconds = time.monotonic() - started
    try:
        if save_tape is not None:
            tape.save(save_tape)
        if save_recording is not None:
            write_tape(save_recording, tape, cards[0], settings, measured)
    finally:
        # Also where a file could not be written: the answer has been worked out by now.
        _print(estimates, _described(found, cards, ranks.node), json=json, elapsed_seconds=elapsed_seconds)
    return 0 if all(e.fits for e in estimates) else 1


def _check_sweep(target: str, save_tape: Path | None, save_recording: Path | None) -> None:
    if target.endswith(".npz") or save_tape is not None or save_recording is not None:
        raise UsageError(
            "--sweep traces a workload once for each row: it takes no saved run, --save-tape or --save-recording"
        )


def _check_recording(save_recording: Path | None, num_cards: int) -> None:
    if save_recording is not None and num_cards > 1:
        raise UsageError("--save-recording writes the run on one GPU: give one --device")


def _tapes(
    target: str, device: str, asked: dict[str, Any], how: dict[str, Any], world: "World | None", *, is_chosen: bool
) -> "list[Tape]":
    """The trace, or those of the ranks that differ."""
    from tightfit.fit.differing_ranks import trace_ranks

    if world is None:
        return [_tape(target, device, asked, how)]
    return list(
        trace_ranks(
            lambda each, sent: _tape(target, device, asked, {**how, "world": each, "ranks": sent}),
            world,
            is_chosen=is_chosen,
        )
    )


def _ranks(tapes: "Sequence[Tape]", estimates: "Sequence[Estimate]") -> "list[RankEstimate]":
    from tightfit.fit.differing_ranks import role_of
    from tightfit.reports.rank_estimates import RankEstimate

    return [
        RankEstimate(role=role_of(tape, tapes), tape=tape, estimate=estimate)
        for tape, estimate in zip(tapes, estimates, strict=True)
    ]


def _described(
    found: "Sequence[Sequence[RankEstimate]]", cards: "Sequence[Device]", node: str | None
) -> list[dict[str, Any]]:
    from tightfit.reports.rank_estimates import ranks_of

    return [ranks_of(ranks, node_of(card, node)) for ranks, card in zip(found, cards, strict=True)]


def _world(ranks: RankOptions, target: str, sweep: Sequence[str], cards: "Sequence[Device]") -> "World | None":
    world = ranks.world()
    for card in cards:
        # A node without such cards, or without so many, is refused before anything is traced.
        kind = node_of(card, ranks.node)
        if world is not None:
            nodes = nodes_for(kind, world.num_ranks, ranks.nodes)
            world = dataclasses.replace(world, num_nodes=max(nodes, world.num_nodes))
    if world is not None and (sweep or target.endswith(".npz")):
        raise UsageError("--gpus traces a script: it takes no --sweep and no saved run")
    return world


def _sweep(
    target: str,
    specifications: Sequence[str],
    cards: Any,
    settings: Any,
    measured: Any,
    asked: Any,
    how: Any,
    shown: Any,
) -> int:
    from tightfit.cli.variants.sweep import option_kinds, write_rows

    known = option_kinds(ModelOptions)
    return write_rows(target, specifications, cards, settings, measured, known_options=known, **shown, **asked, **how)


def _tape(target: str, device: str, asked: dict[str, Any], how: dict[str, Any]) -> "Tape":
    """The trace of the target for the first GPU; the others replay the same tape with their own workspaces, context and speeds."""
    from tightfit import fit

    if target.endswith(".npz"):
        if any(asked.values()):
            raise UsageError(f"{target} is a finished run: it takes no arguments, -p or model options")
        how["tracing"].refuse_for(target)
        return _saved_tape(target)
    tracing = how["tracing"]
    is_rewritten = not tracing.show_output
    with ProgressLine(f"estimate {target}", timeout_seconds=tracing.timeout, is_rewritten=is_rewritten) as line:
        return fit.capture(target, device=device, **asked, **how, on_progress=line.report)


def _saved_tape(path: str) -> "Tape":
    from tightfit.tape.load import read_tape

    if not Path(path).is_file():
        raise UsageError(no_file(path))
    return read_tape(path)


def _print(
    estimates: "Sequence[Estimate]", ranks: Sequence[dict[str, Any]], *, json: bool, elapsed_seconds: float
) -> None:
    from tightfit.reports.rank_estimates import rank_words
    from tightfit.reports.text import estimates as text_report

    if json:
        for estimate, of_ranks in zip(estimates, ranks, strict=True):
            answer = estimate.to_json() | of_ranks | {"elapsed_seconds": round(elapsed_seconds, 2)}
            sys.stdout.write(jsonlib.dumps(answer) + "\n")
        return
    if len(estimates) == 1:
        text_report.write_estimate(estimates[0], elapsed_seconds=elapsed_seconds)
    else:
        text_report.write_comparison(estimates, elapsed_seconds=elapsed_seconds)
    if ranks[0]:
        sys.stdout.write(rank_words(ranks[0]) + "\n")
