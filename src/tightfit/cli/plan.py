"""`tightfit plan`: the fastest combination of techniques with which a workload fits a GPU, found and verified without the GPU."""

import dataclasses
import json as jsonlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from tightfit.cli.arguments.options import (
    AS_KNOWN,
    AS_USUAL,
    NO_OPTIONS,
    SEVERAL,
    GpuOptions,
    ModelOptions,
    TraceOptions,
)
from tightfit.cli.arguments.sizes import Size, budget_on
from tightfit.cli.arguments.used import used_now
from tightfit.cli.shared.early_server import begin_server
from tightfit.cli.shared.local_cards import own_card
from tightfit.cli.shared.progress import ProgressLine
from tightfit.cli.variants.plan_cards import ONE_CARD, Cards, check_alone, plan_cards
from tightfit.cli.variants.plan_ladder import files_of, plan_ladder
from tightfit.errors import UsageError
from tightfit.output_files import check_outputs
from tightfit.reports.redacted import redacted

if TYPE_CHECKING:
    from tightfit.reports.plans import Plan


@Parameter(name="*", group=Group("Limits of the plan", sort_key=0))
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a plan may use and change.

    Parameters
    ----------
    budget
        GPU memory that the process may use, such as 22GiB or 80%. Default: all of it.
    host
        Host memory that techniques may use, page-locked, such as 32GiB. If not given, nothing is moved to the host.
    disk
        Disk space that techniques may use, such as 200GiB; they move it through buffers in host memory, for which --host is needed too. If not given, nothing is moved to disk.
    allow
        A technique that changes results but may be used, or lossy for all of them; repeatable.
    without
        A technique to leave out, or TECHNIQUE@MODULE[,MODULE...] to leave it out of some modules, such as checkpointing@GPT.h.3 or tiled_tokens@GPT.h.*; repeatable.
    margin
        Which end of a peak's range has to fit: safe (the upper end; if not given), likely (the likely peak) or 0 (the lower end).
    """

    budget: Size | None = None
    host: Size | None = None
    disk: Size | None = None
    allow: Annotated[tuple[str, ...], SEVERAL] = ()
    without: Annotated[tuple[str, ...], SEVERAL] = ()
    margin: str = "safe"


NO_BOUNDS = Bounds()


def plan(
    target: str,
    /,
    *arguments: Annotated[str, Parameter(show=False)],
    device: str | None = None,
    parameter: Annotated[tuple[str, ...], SEVERAL, Parameter(alias="-p")] = (),
    search: str | None = None,
    ladder: int | None = None,
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
    json: bool = False,
    as_code: bool = False,
    redact: bool = False,
    no_prove: bool = False,
    bounds: Bounds = NO_BOUNDS,
    cards: Cards = ONE_CARD,
    gpu: GpuOptions = AS_KNOWN,
    tracing: TraceOptions = AS_USUAL,
    model: ModelOptions = NO_OPTIONS,
) -> int:
    """Find the fastest combination of techniques with which a workload fits a GPU. No GPU is needed; the workload is not changed.

    Exit code 1 if no allowed technique makes it fit.

    Parameters
    ----------
    target
        As for tightfit estimate: a script (its own arguments after --), FILE.py:FUNCTION, package.module:FUNCTION, a Hugging Face config.
    device
        A GPU by name ("4090", "a100-80gb") or its TOML file. Default: the GPU of this machine.
    parameter
        NAME=VALUE, a keyword argument of the generator function; repeatable.
    search
        Find the largest batch size: the name of the parameter of the generator function, or of the script's option, that sets it (batch_size). The answer has the largest size that fits without changes, the largest with techniques, and the fastest.
    ladder
        Make this many plans, from the fastest to the one that uses the least memory, for tightfit run --guard; -o plan.json writes plan-1.json and so on.
    output
        Write the plan to this file (JSON), for tightfit run --plan; with --export that tool's file.
    json
        Print the plan as JSON.
    as_code
        Print the plan as lines to paste into the program, which then needs no tightfit run; with -o the lines read that file, otherwise they contain the plan.
    redact
        Write ~ in place of home folders in every path, for a report that is sent to somebody.
    no_prove
        Do not verify the plan by values: by default three steps run on the CPU, plain and planned, where that takes 20 s or less.
    """
    started = time.monotonic()
    begin_server(target, tracing)
    from tightfit.fit.planning import plan as find_plan

    check_outputs({"--output": output}, inputs=(target, gpu.calibration, device))
    if as_code and (json or search is not None):
        raise UsageError("--as-code prints lines of Python: it goes with neither --json nor --search")
    if search is not None and no_prove:
        raise UsageError("--search finds batch sizes and proves no plan: it takes no --no-prove")
    is_for_one = search is None and not (as_code or redact) and cards == ONE_CARD
    files = [] if ladder is None else files_of(output, ladder, goes=is_for_one)
    card = device or own_card(arguments)
    if cards != ONE_CARD:
        is_plain = not (search or as_code or redact or no_prove) and gpu == AS_KNOWN
        check_alone(is_plain and bounds == dataclasses.replace(NO_BOUNDS, budget=bounds.budget), cards, output)
        traced = {"arguments": arguments, "parameters": parameter, "options": model.given(), "tracing": tracing}
        return plan_cards(target, card, cards, budget=bounds.budget, output=output, json=json, **traced)
    settings = _settings(bounds, gpu, card, used_now(gpu.used, card, is_own=device is None)) | {
        "arguments": arguments,
        "parameters": parameter,
        "options": model.given(),
    }
    line = ProgressLine(f"plan {target}", timeout_seconds=tracing.timeout, is_rewritten=not tracing.show_output)
    if search is not None:
        settings |= {"tracing": tracing}
        return _search(search, target, card, line, bounds, output=output, json=json, redact=redact, **settings)
    settings |= {"host": bounds.host, "disk": bounds.disk, "prove": not no_prove, **dataclasses.asdict(tracing)}
    if files:
        return plan_ladder(target, card, line, files=files, json=json, **settings)
    with line:
        found = find_plan(target, card, on_progress=line.report, **settings)
    found = redacted(found) if redact else found
    _deliver(found, target, output, json=json, as_code=as_code, elapsed_seconds=time.monotonic() - started)
    return 0 if found.fits else 1


def _settings(bounds: Bounds, gpu: GpuOptions, device: str, used: str | int | None) -> dict[str, Any]:
    return {
        "budget": None if bounds.budget is None else budget_on(bounds.budget, device, used),
        "used": used,
        "allow": bounds.allow,
        "without": bounds.without,
        "margin": bounds.margin,
        "alloc_conf": gpu.alloc_conf,
        "calibration": gpu.calibration,
    }


def _deliver(
    found: "Plan", target: str, output: Path | None, *, json: bool, as_code: bool, elapsed_seconds: float
) -> None:
    try:
        if output is not None:
            found.save(output)
    finally:
        # Also where the file could not be written: the plan has been found by now.
        if as_code:
            _write_code(found, target, output)
        else:
            _write(found, json=json, elapsed_seconds=elapsed_seconds)


def _write_code(found: "Plan", target: str, output: Path | None) -> None:
    from tightfit.planner.explain import verdict
    from tightfit.reports.text.plan_code import plan_code

    # Only the lines go to stdout, where they can be piped into a file.
    sys.stderr.write(f"tightfit: {verdict(found)}\n")
    if found.fits:
        path = next((part for part in (target, target.rpartition(":")[0]) if part.endswith(".py")), "")
        source = Path(path).read_text(encoding="utf-8", errors="replace") if path else ""
        sys.stdout.write(plan_code(found, source=source, path=path, saved=None if output is None else str(output)))


def _write(found: "Plan", *, json: bool, elapsed_seconds: float) -> None:
    # elapsed_seconds is printed but not saved: the same plan gives the same file.
    from tightfit.reports.plans import write_plan

    if json:
        sys.stdout.write(jsonlib.dumps(found.to_json() | {"elapsed_seconds": round(elapsed_seconds, 2)}) + "\n")
    else:
        write_plan(found, elapsed_seconds=elapsed_seconds)


def _search(
    parameter: str,
    target: str,
    device: str,
    line: ProgressLine,
    bounds: Bounds,
    *,
    output: Path | None,
    json: bool,
    redact: bool,
    **settings: Any,
) -> int:
    from tightfit.fit.batch_size import batch_sizes
    from tightfit.reports.text.batch_sizes import write_batch_sizes

    started = time.monotonic()
    if bounds.host is not None or bounds.disk is not None:
        raise UsageError("--search finds batch sizes without --host and --disk: plan again with the one you choose")
    if output is not None:
        raise UsageError("--search finds batch sizes: plan again with the one you choose for --output")
    with line:
        found = batch_sizes(target, device, parameter=parameter, on_progress=line.report, **settings)
    found = redacted(found) if redact else found
    elapsed_seconds = time.monotonic() - started
    if json:
        sys.stdout.write(jsonlib.dumps(found.to_json() | {"elapsed_seconds": round(elapsed_seconds, 2)}) + "\n")
    else:
        write_batch_sizes(found, elapsed_seconds=elapsed_seconds)
    return 0 if found.fits else 1
