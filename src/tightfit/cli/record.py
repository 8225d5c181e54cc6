"""`tightfit record`: runs a workload and writes a recording of its memory with marks: in this process on the card, or traced on a virtual one.

Whatever computes is imported when the command runs, so that its `--help` is instant.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from tightfit.cli.arguments import terminated
from tightfit.cli.arguments.options import CLOSED_IN, Permissions
from tightfit.cli.arguments.programs import INTERRUPTED, TERMINATED, Enough, exit_code_of
from tightfit.errors import CaptureError, UsageError
from tightfit.output_files import check_outputs
from tightfit.units import format_bytes

if TYPE_CHECKING:
    from tightfit.capture.targets.target_kinds import GeneratorFunction, Script
    from tightfit.recordings.recording import ActiveRecording

_SEVERAL = Parameter(consume_multiple=False)
# Large enough for most programs: on a card that is too small a recording shows what did not fit.
_DEFAULT_VIRTUAL_DEVICE = "H200"


def record(
    target: str,
    /,
    *arguments: Annotated[str, Parameter(show=False)],
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
    parameter: Annotated[tuple[str, ...], _SEVERAL, Parameter(alias="-p")] = (),
    steps: int | None = None,
    device: str | None = None,
    host: bool = False,
    timeout: float = 120.0,
    no_stacks: bool = False,
    max_events: int | None = None,
    permissions: Permissions = CLOSED_IN,
) -> int:
    """Run a script as python would and record its memory on the GPU; where there is none, trace it on a virtual GPU.

    Parameters
    ----------
    target
        A script (its own arguments after --), or FILE.py:FUNCTION, a generator function that yields once per step.
    output
        The file to write. Default: the name of the script, with .recording.pickle.
    parameter
        NAME=VALUE, a keyword argument of the generator function; repeatable.
    steps
        End the run after this many steps. Default for a script: when it ends; for a function and on a virtual GPU: 3.
    device
        Record on a virtual GPU of this name ("4090", or its TOML file), even if there is a real one. Default without a real one: H200.
    host
        Run it on this machine without a GPU, and record the tensors in host memory.
    timeout
        On a virtual GPU: seconds to wait for the first step, and from each to the next, 120 if not given.
    no_stacks
        Do not record the stack of each allocation.
    max_events
        Keep the last N events, 200000 if not given.
    """
    from tightfit.capture.targets.target_kinds import HuggingFaceConfig, Script, parse_target
    from tightfit.recordings.recording import DEFAULT_MAX_EVENTS
    from tightfit.recordings.recording import record as new_recording

    num_events = DEFAULT_MAX_EVENTS if max_events is None else max_events
    _check(steps, num_events)
    parsed = parse_target(target, arguments=arguments, parameters=parameter)
    if isinstance(parsed, HuggingFaceConfig):
        raise UsageError(
            f"{target} is neither a script (FILE.py) nor a function (FILE.py:FUNCTION): only those can be run"
        )
    path = output or Path(f"{_stem(target)}.recording.pickle")
    check_outputs({"--output": path}, inputs=(target,))
    if host and device is not None:
        raise UsageError(f"--host records on this machine and --device {device} on a virtual GPU: give one of them")
    if device is not None or not (host or _has_card()):
        if no_stacks or max_events is not None:
            raise UsageError(
                "--no-stacks and --max-events are for a run on a real GPU or with --host: a virtual one records all events"
            )
        return _record_virtually(
            target,
            path,
            device,
            arguments=arguments,
            parameters=parameter,
            steps=steps or 3,
            timeout=timeout,
            permissions=permissions,
        )
    recording = new_recording(path, stacks=not no_stacks, max_events=num_events)
    if isinstance(parsed, Script):
        code = exit_code_of(lambda: _run_script(parsed, recording, steps), parsed.path, closes_first=True)
    else:
        code = exit_code_of(lambda: _run_function(parsed, recording, steps or 3), parsed.location, closes_first=True)
    how = {INTERRUPTED: "interrupted", TERMINATED: "terminated"}.get(code, "")
    line = _line(recording, how)
    if code == TERMINATED:
        terminated.end(line)
    sys.stderr.write(f"tightfit: {line}\n" if line else "")
    return code


def _check(steps: int | None, num_events: int) -> None:
    if steps is not None and steps < 1:
        raise UsageError(f"--steps {steps}: at least one step must be run")
    if num_events < 1:
        raise UsageError(f"--max-events {num_events}: at least one event must be kept")


def _has_card() -> bool:
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        # Tracing says what is to be installed.
        return False
    return torch.cuda.is_available()


def _record_virtually(
    target: str,
    path: Path,
    device: str | None,
    *,
    arguments: Sequence[str],
    parameters: Sequence[str],
    steps: int,
    timeout: float,
    permissions: Permissions,
) -> int:
    """Traces the first steps on a virtual GPU and writes them in the form of a recording."""
    from tightfit import fit
    from tightfit.capture.trace_settings import TraceSettings
    from tightfit.devices.catalogue import find
    from tightfit.recordings.write import write_tape
    from tightfit.tape import SpanKind

    card = find(device or _DEFAULT_VIRTUAL_DEVICE)
    tape = fit.capture(
        target,
        device=device or card.name,
        arguments=arguments,
        parameters=parameters,
        tracing=TraceSettings(steps=steps, timeout=timeout, **dataclasses.asdict(permissions)),
    )
    num_bytes = write_tape(path, tape, card, fit.allocator_settings())
    num_steps = int((tape.spans.kind == SpanKind.STEP).sum())
    why = "" if device else " (there is no GPU here; --device names another, --host records this machine's memory)"
    sys.stderr.write(
        f"tightfit: wrote {path}: {_steps(num_steps)} on a virtual {card.name}{why}, {format_bytes(num_bytes)};"
        f" next: tightfit doctor {path}\n"
    )
    return 0


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _stem(target: str) -> str:
    # FILE.py:FUNCTION is named after the file, package.module:FUNCTION after the module.
    location = target.rpartition(":")[0] or target
    return Path(location).stem if location.endswith(".py") else location


def _run_script(script: "Script", recording: "ActiveRecording", num_steps: int | None) -> None:
    from tightfit.capture.targets.target_kinds import run_script

    with recording:
        hooks = recording.recorder.hooks

        def stop_when_over() -> None:
            if num_steps is not None and hooks.steps.num_steps >= num_steps:
                raise Enough

        # Between two turns of the loop, so that a recorded step is always a whole one.
        hooks.before_turn = stop_when_over
        held = run_script(script)  # noqa: F841 - what lives at the end of a script is there when its memory is looked at


def _run_function(function: "GeneratorFunction", recording: "ActiveRecording", num_steps: int) -> None:
    from tightfit.capture.targets.target_kinds import generator_of

    # Imports the user's module and checks the parameters; the function's set-up runs at the first next(), which is recorded.
    generator = generator_of(function)
    with recording:
        for _ in range(num_steps):
            try:
                next(generator)
            except StopIteration:
                break
            recording.step()
    if recording.written is not None and not recording.written.num_steps:
        raise CaptureError("the function did not yield: set up, then `yield` once per step")


def _line(recording: "ActiveRecording", how: str) -> str:
    """What is said at the end; `how` a signal ended it, if one did."""
    written = recording.written
    if written is None:
        return how
    first = f"{how}; " if how else ""
    return (
        f"{first}wrote {written.path}: {written.num_events:,} events in {_steps(written.num_steps)} on {written.device},"
        f" {format_bytes(written.num_bytes)}; next: tightfit doctor {written.path}"
    )
