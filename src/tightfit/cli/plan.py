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
from tightfit.cli.sizes import Size, with_unit
from tightfit.cli.used import used_now
from tightfit.errors import UsageError
from tightfit.output_files import check_outputs

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
        What the process may hold on the card, such as 22GiB or 80%. Default: all of it.
    used
        What other processes hold on the card, such as 3GiB. Default: for this machine's own card what its driver says, else nothing.
    host
        Not used yet, and refused: what techniques may move to the host's memory.
    disk
        Not used yet, and refused: what techniques may move to disk.
    allow
        A technique that changes results and may be taken nevertheless, or lossy for all of them; once for each.
    without
        A technique that is left out, or TECHNIQUE@PLACE[,PLACE...] for it at some modules alone, such as checkpointing@GPT.h.3 or
        tiled_tokens@GPT.h.*; once for each.
    """

    budget: Size | None = None
    used: Size | None = None
    host: str | None = None
    disk: str | None = None
    allow: Annotated[tuple[str, ...], _SEVERAL] = ()
    without: Annotated[tuple[str, ...], _SEVERAL] = ()


NO_BOUNDS = Bounds()


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """What becomes of a plan.

    Parameters
    ----------
    output
        Write the plan to this file (JSON), for tightfit run --plan.
    json
        Print the plan as JSON.
    as_code
        Print the plan as lines to paste into the program, which then needs no tightfit run; with -o they read that file, else they have the plan.
    """

    output: Annotated[Path | None, Parameter(alias="-o")] = None
    json: bool = False
    as_code: bool = False


PLAIN_ANSWER = AnswerOptions()


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
    answer: AnswerOptions = PLAIN_ANSWER,
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
    show_output
        Show what the workload prints, on stderr.
    no_prove
        Do not run three steps on this machine's processor, plain and planned, to compare what they leave. Without this that is done where it takes
        20 s at most, for generator functions and Hugging Face configs; a script may write files, and is not run.
    """
    from tightfit.fit.planning import plan as find_plan

    started = time.monotonic()
    check_outputs({"--output": answer.output}, inputs=(target, calibration, device))
    _check(bounds, answer, search)
    card = device or own_card()
    settings: dict[str, Any] = {
        **_sizes(bounds, card, is_own=device is None),
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
        return _search(search, target, card, answer, **settings)
    found = find_plan(target, card, host=bounds.host, disk=bounds.disk, prove=not no_prove, **settings)
    try:
        if answer.output is not None:
            found.save(answer.output)
    finally:
        # Also where the file could not be written: the plan has been found by now.
        _write(found, target, answer, elapsed_seconds=time.monotonic() - started)
    return 0 if found.fits else 1


def _check(bounds: Bounds, answer: AnswerOptions, search: str | None) -> None:
    if answer.as_code and (answer.json or search is not None):
        raise UsageError("--as-code prints lines of Python: it goes with neither --json nor --search")
    if search is not None and (bounds.host is not None or bounds.disk is not None):
        raise UsageError("--host and --disk: no technique moves anything there yet; leave them out")
    if search is not None and answer.output is not None:
        raise UsageError("--search answers with sizes of a batch: plan again with the one you choose for --output")


def _sizes(bounds: Bounds, card: str, *, is_own: bool) -> dict[str, Any]:
    budget = None if bounds.budget is None else with_unit("--budget", bounds.budget)
    return {"budget": budget, "used": used_now(bounds.used, card, is_own=is_own)}


def _write_code(found: "Plan", target: str, output: Path | None) -> None:
    from tightfit.planner.explain import verdict
    from tightfit.reports.text.plan_code import plan_code

    # Only the lines go to stdout, where they can be piped into a file.
    sys.stderr.write(f"tightfit: {verdict(found)}\n")
    if found.fits:
        path = next((part for part in (target, target.rpartition(":")[0]) if part.endswith(".py")), "")
        source = Path(path).read_text(encoding="utf-8", errors="replace") if path else ""
        sys.stdout.write(plan_code(found, source=source, path=path, saved=None if output is None else str(output)))


def _write(found: "Plan", target: str, answer: AnswerOptions, *, elapsed_seconds: float) -> None:
    # elapsed_seconds is printed but not saved: the same plan gives the same file.
    from tightfit.reports.plans import write_plan

    if answer.as_code:
        _write_code(found, target, answer.output)
    elif answer.json:
        sys.stdout.write(jsonlib.dumps(found.to_json() | {"elapsed_seconds": round(elapsed_seconds, 2)}) + "\n")
    else:
        write_plan(found, elapsed_seconds=elapsed_seconds)


def _search(parameter: str, target: str, device: str, answer: AnswerOptions, **settings: Any) -> int:
    from tightfit.fit.batch_size import batch_sizes
    from tightfit.reports.text.batch_sizes import write_batch_sizes

    started = time.monotonic()
    found = batch_sizes(target, device, parameter=parameter, **settings)
    elapsed_seconds = time.monotonic() - started
    if answer.json:
        sys.stdout.write(jsonlib.dumps(found.to_json() | {"elapsed_seconds": round(elapsed_seconds, 2)}) + "\n")
    else:
        write_batch_sizes(found, elapsed_seconds=elapsed_seconds)
    return 0 if found.fits else 1


def _say(what: str) -> None:
    # The line is rewritten in place, which makes no sense in a log file, so this is used on a terminal only.
    sys.stderr.write(f"\r\x1b[K{what}\r")
    sys.stderr.flush()
