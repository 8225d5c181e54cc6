"""`tightfit record`: runs a workload as it is, in this process, and writes a recording of its memory with marks.

Whatever computes is imported when the command runs, so that its `--help` is instant.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from tightfit.cli.programs import Enough, exit_code_of
from tightfit.errors import CaptureError, UsageError
from tightfit.units import format_bytes

if TYPE_CHECKING:
    from tightfit.capture.targets import GeneratorFunction, Script
    from tightfit.recordings.recording import Recording

_SEVERAL = Parameter(consume_multiple=False)


def record(
    target: str,
    /,
    *arguments: Annotated[str, Parameter(show=False)],
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
    parameter: Annotated[tuple[str, ...], _SEVERAL, Parameter(alias="-p")] = (),
    steps: int | None = None,
    no_stacks: bool = False,
    max_events: int | None = None,
) -> int:
    """Run a script as python would and record its memory: on the GPU, or of tensors on the host where there is none.

    Parameters
    ----------
    target
        A script (its own arguments after --), or FILE.py:FUNCTION, a generator function that yields once per step.
    output
        The file to write. Default: the name of the script, with .recording.pickle.
    parameter
        NAME=VALUE, a keyword argument of the generator function; repeatable.
    steps
        End the run after this many steps. Default for a script: when it ends; for a function: 3.
    no_stacks
        Do not record the stack of each allocation.
    max_events
        Keep the last N events, 200000 if not given.
    """
    from tightfit.capture.targets import HuggingFaceConfig, Script, parse_target
    from tightfit.recordings.recording import DEFAULT_MAX_EVENTS
    from tightfit.recordings.recording import record as new_recording

    if steps is not None and steps < 1:
        raise UsageError(f"--steps {steps}: at least one step must be run")
    parsed = parse_target(target, arguments=arguments, parameters=parameter)
    if isinstance(parsed, HuggingFaceConfig):
        raise UsageError(
            f"{target} is neither a script (FILE.py) nor a function (FILE.py:FUNCTION): only those can be run"
        )
    path = output or Path(f"{_stem(target)}.recording.pickle")
    recording = new_recording(path, stacks=not no_stacks, max_events=max_events or DEFAULT_MAX_EVENTS)
    if isinstance(parsed, Script):
        code = exit_code_of(lambda: _run_script(parsed, recording, steps), parsed.path)
    else:
        code = exit_code_of(lambda: _run_function(parsed, recording, steps or 3), parsed.location)
    _say(recording)
    return code


def _stem(target: str) -> str:
    # FILE.py:FUNCTION is named after the file, package.module:FUNCTION after the module.
    location = target.rpartition(":")[0] or target
    return Path(location).stem if location.endswith(".py") else location


def _run_script(script: "Script", recording: "Recording", num_steps: int | None) -> None:
    from tightfit.capture.targets import run_script

    with recording:
        hooks = recording.recorder.hooks

        def stop_when_over() -> None:
            if num_steps is not None and hooks.num_steps >= num_steps:
                raise Enough

        # Between two turns of the loop, so that a recorded step is always a whole one.
        hooks.before_turn = stop_when_over
        held = run_script(script)  # noqa: F841 - what lives at the end of a script is there when its memory is looked at


def _run_function(function: "GeneratorFunction", recording: "Recording", num_steps: int) -> None:
    from tightfit.capture.targets import generator_of

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


def _say(recording: "Recording") -> None:
    written = recording.written
    if written is None:
        return
    steps = "1 step" if written.num_steps == 1 else f"{written.num_steps} steps"
    sys.stderr.write(
        f"tightfit: wrote {written.path}: {written.num_events:,} events in {steps} on {written.device},"
        f" {format_bytes(written.num_bytes)}; next: tightfit doctor {written.path}\n"
    )
