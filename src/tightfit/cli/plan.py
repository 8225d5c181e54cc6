"""`tightfit plan`: the fastest combination of techniques with which a workload fits a GPU, found and verified without the GPU."""

import dataclasses
import json as jsonlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from tightfit.cli.devices import own_card
from tightfit.cli.estimate import NO_OPTIONS, ModelOptions
from tightfit.cli.progress import ProgressLine
from tightfit.errors import UsageError

if TYPE_CHECKING:
    from tightfit.reports.plans import Plan

_SEVERAL = Parameter(consume_multiple=False)


@Parameter(name="*", group=Group("What a plan may do", sort_key=1))
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a plan may use and change.

    Parameters
    ----------
    budget
        What the process may hold on the card, such as 22GiB. Default: all of it.
    host
        Not used yet, and refused: what techniques may move to the host's memory.
    disk
        Not used yet, and refused: what techniques may move to disk.
    allow
        A technique that changes results and may be taken nevertheless, or lossy for all of them; once for each.
    without
        A technique that is left out, or TECHNIQUE@PLACE[,PLACE...] for it at some modules alone, such as checkpointing@GPT.h.3 or
        tiled_tokens@GPT.h.*; once for each.
    margin
        Which end of a peak's range has to fit: safe (the upper end; if not given), likely (the likely peak) or 0 (the lower end).
    """

    budget: str | None = None
    host: str | None = None
    disk: str | None = None
    allow: Annotated[tuple[str, ...], _SEVERAL] = ()
    without: Annotated[tuple[str, ...], _SEVERAL] = ()
    margin: str = "safe"


NO_BOUNDS = Bounds()


def plan(
    target: str,
    /,
    *arguments: Annotated[str, Parameter(show=False)],
    device: str | None = None,
    parameter: Annotated[tuple[str, ...], _SEVERAL, Parameter(alias="-p")] = (),
    steps: int = 3,
    timeout: float = 120.0,
    alloc_conf: str | None = None,
    calibration: Path | None = None,
    search: str | None = None,
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
    json: bool = False,
    show_output: bool = False,
    no_prove: bool = False,
    bounds: Bounds = NO_BOUNDS,
    model: ModelOptions = NO_OPTIONS,
) -> int:
    """Find the fastest combination of techniques with which a workload fits a card. No card is needed; the workload is not changed.

    Exit code 1 if nothing that is allowed makes it fit.

    Parameters
    ----------
    target
        As for tightfit estimate: a script (its own arguments after --), FILE.py:FUNCTION, package.module:FUNCTION, a Hugging Face config.
    device
        A card by name ("4090", "a100-80gb") or its TOML file. Default: this machine's own.
    parameter
        NAME=VALUE, a keyword argument of the generator function; once for each.
    steps
        How many steps to trace, 3 if not given; the worst one counts.
    timeout
        Seconds to wait for the first step, and from each to the next, 120 if not given.
    alloc_conf
        Allocator settings, as in PYTORCH_CUDA_ALLOC_CONF. Default: that variable.
    calibration
        What was measured on that machine: a TOML file with its context and speeds.
    search
        The name of what sets the batch's size (batch_size): a parameter of the generator function, or an option of the script. The answer is then
        the largest size that fits, as it is and with techniques, and the fastest.
    output
        Write the plan to this file (JSON), for tightfit run --plan.
    json
        Print the plan as JSON.
    show_output
        Show what the workload prints, on stderr.
    no_prove
        Do not run three steps on this machine's processor, plain and planned, to compare what they leave. Without this that is done where it takes
        20 s at most, for generator functions and Hugging Face configs; a script may write files, and is not run.
    """
    from tightfit.fit.planning import plan as find_plan

    started = time.monotonic()
    if output is not None and not output.resolve().parent.is_dir():
        raise UsageError(f"--output {output}: there is no folder {output.parent}")
    settings: dict[str, Any] = {
        "budget": bounds.budget,
        "allow": bounds.allow,
        "without": bounds.without,
        "margin": bounds.margin,
        "arguments": arguments,
        "parameters": parameter,
        "options": model.given(),
        "steps": steps,
        "timeout": timeout,
        "alloc_conf": alloc_conf,
        "calibration": calibration,
        "show_output": show_output,
    }
    line = ProgressLine(f"plan {target}", timeout_seconds=timeout, is_rewritten=not show_output)
    if search is not None:
        return _search(search, target, device or own_card(), line, bounds, output=output, json=json, **settings)
    settings |= {"host": bounds.host, "disk": bounds.disk, "prove": not no_prove}
    with line:
        found = find_plan(target, device or own_card(), on_progress=line.report, **settings)
    if output is not None:
        found.save(output)
    _write(found, json=json, elapsed_seconds=time.monotonic() - started)
    return 0 if found.fits else 1


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
    **settings: Any,
) -> int:
    from tightfit.fit.batch_size import batch_sizes
    from tightfit.reports.text.batch_sizes import write_batch_sizes

    started = time.monotonic()
    if bounds.host is not None or bounds.disk is not None:
        raise UsageError("--host and --disk: no technique moves anything there yet; leave them out")
    if output is not None:
        raise UsageError("--search answers with sizes of a batch: plan again with the one you choose for --output")
    with line:
        found = batch_sizes(target, device, parameter=parameter, on_progress=line.report, **settings)
    elapsed_seconds = time.monotonic() - started
    if json:
        sys.stdout.write(jsonlib.dumps(found.to_json() | {"elapsed_seconds": round(elapsed_seconds, 2)}) + "\n")
    else:
        write_batch_sizes(found, elapsed_seconds=elapsed_seconds)
    return 0 if found.fits else 1
