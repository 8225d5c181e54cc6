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
from tightfit.errors import UsageError
from tightfit.reports.redacted import redacted

if TYPE_CHECKING:
    from tightfit.reports.plans import Plan

_SEVERAL = Parameter(consume_multiple=False)


@Parameter(name="*", group=Group("Limits of the plan", sort_key=1))
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a plan may use and change.

    Parameters
    ----------
    budget
        GPU memory that the process may use, such as 22GiB. Default: all of it.
    host
        Host memory that techniques may use; refused, as none does yet.
    disk
        Disk space that techniques may use; refused, as none does yet.
    allow
        A technique that changes results but may be used, or lossy for all of them; repeatable.
    without
        A technique to leave out, or TECHNIQUE@MODULE[,MODULE...] to leave it out of some modules, such as checkpointing@GPT.h.3 or
        tiled_tokens@GPT.h.*; repeatable.
    """

    budget: str | None = None
    host: str | None = None
    disk: str | None = None
    allow: Annotated[tuple[str, ...], _SEVERAL] = ()
    without: Annotated[tuple[str, ...], _SEVERAL] = ()


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
    redact: bool = False,
    no_prove: bool = False,
    bounds: Bounds = NO_BOUNDS,
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
    steps
        How many steps to trace, 3 if not given; the one with the highest peak counts.
    timeout
        Seconds to wait for the first step, and for each next one, 120 if not given.
    alloc_conf
        Allocator settings, as in PYTORCH_CUDA_ALLOC_CONF. Default: that variable.
    calibration
        The TOML file that tightfit calibrate wrote on that machine.
    search
        Find the largest batch size: the parameter of the function, or the option of the script, that sets it (batch_size).
    output
        Write the plan to this file (JSON), for tightfit run --plan.
    json
        Print the plan as JSON.
    show_output
        Show the output of the workload, on stderr.
    redact
        Write ~ in place of home folders in every path, for a report that is sent to somebody.
    no_prove
        Do not verify the plan by values: by default three steps run on the CPU, plain and planned, where that takes 20 s or less (not for scripts).
    """
    from tightfit.fit.planning import plan as find_plan

    started = time.monotonic()
    if output is not None and not output.resolve().parent.is_dir():
        raise UsageError(f"--output {output}: there is no folder {output.parent}")
    card = device or own_card()
    settings: dict[str, Any] = {
        "budget": bounds.budget,
        "allow": bounds.allow,
        "without": bounds.without,
        "arguments": arguments,
        "parameters": parameter,
        "options": model.given(),
        "steps": steps,
        "timeout": timeout,
        "alloc_conf": alloc_conf,
        "calibration": calibration,
        "show_output": show_output,
        "say": _say if sys.stderr.isatty() else None,
    }
    if search is not None:
        return _search(search, target, card, bounds, output=output, json=json, redact=redact, **settings)
    found = find_plan(target, card, host=bounds.host, disk=bounds.disk, prove=not no_prove, **settings)
    found = redacted(found) if redact else found
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
        raise UsageError("--host and --disk: no technique moves anything there yet; leave them out")
    if output is not None:
        raise UsageError("--search finds batch sizes: plan again with the one you choose for --output")
    found = batch_sizes(target, device, parameter=parameter, **settings)
    found = redacted(found) if redact else found
    elapsed_seconds = time.monotonic() - started
    if json:
        sys.stdout.write(jsonlib.dumps(found.to_json() | {"elapsed_seconds": round(elapsed_seconds, 2)}) + "\n")
    else:
        write_batch_sizes(found, elapsed_seconds=elapsed_seconds)
    return 0 if found.fits else 1


def _say(what: str) -> None:
    # The line is rewritten in place, which makes no sense in a log file, so this is used on a terminal only.
    sys.stderr.write(f"\r\x1b[K{what}\r")
    sys.stderr.flush()
