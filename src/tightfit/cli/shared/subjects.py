"""The inputs of `tightfit doctor` and `tightfit diff`: a recording, a saved run, or a workload, which is traced first."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tightfit.capture.targets.target_files import refuse_no_name, refuse_other_files
from tightfit.cli.arguments.options import AS_USUAL, TraceOptions
from tightfit.cli.shared.local_cards import own_card
from tightfit.cli.shared.progress import ProgressLine
from tightfit.cli.shared.recorded_devices import shown_device
from tightfit.errors import UsageError
from tightfit.errors.missing_files import no_file

if TYPE_CHECKING:
    from tightfit.diagnosis.diagnosed_run import DiagnosedRun

_RECORDINGS = (".pickle", ".pkl")
# The PROTO opcode of pickle protocol 2 and up: recordings are known by their content, whatever their name.
_PICKLE = b"\x80"


def subject_of(
    target: str,
    *,
    device: str | None,
    arguments: Sequence[str] = (),
    parameters: Sequence[str] = (),
    alloc_conf: str | None = None,
    tracing: TraceOptions = AS_USUAL,
) -> "DiagnosedRun":
    """The run that `target` names; `device` is by default the GPU that a saved run was traced for, or this machine's own.

    Raises:
        UsageError: no such target or device, or options that a run that is over does not take.
        RecordingError: the file cannot be read.
        CaptureError: the workload could not be traced.
    """
    # By its ending too, so that a misspelt name of a recording is not taken for a module to import.
    is_recording = _is_recording(target)
    if not is_finished(target):
        refuse_other_files(target)
    else:
        if arguments or parameters:
            raise UsageError(f"{target} is a finished run: it takes no arguments or -p")
        tracing.refuse_for(target)
        if not Path(target).is_file():
            raise UsageError(no_file(target))
    return (
        _recorded(target, device, alloc_conf)
        if is_recording
        else _traced(target, device, arguments=arguments, parameters=parameters, alloc_conf=alloc_conf, tracing=tracing)
    )


def is_finished(target: str) -> bool:
    """Whether that is a run that is over, recorded or traced, and not one to trace."""
    return _is_recording(target) or target.endswith(".npz")


def _is_recording(target: str) -> bool:
    return target.endswith(_RECORDINGS) or _is_pickle(target)


def _is_pickle(target: str) -> bool:
    refuse_no_name(target)
    path = Path(target)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(1) == _PICKLE


def _recorded(target: str, device: str | None, alloc_conf: str | None) -> "DiagnosedRun":
    from tightfit.diagnosis.diagnosed_run import subject_of_recording
    from tightfit.recordings.read import read_recording

    # doctor explains what happened; other settings would change addresses and segments, and with them the diagnosis.
    if alloc_conf is not None:
        raise UsageError(
            f"{target} was recorded with its own settings; tightfit replay --alloc-conf replays it with others"
        )
    recording = read_recording(target)
    return subject_of_recording(recording, shown_device(recording, [device]))


def _traced(
    target: str,
    device: str | None,
    *,
    arguments: Sequence[str],
    parameters: Sequence[str],
    alloc_conf: str | None,
    tracing: TraceOptions,
) -> "DiagnosedRun":
    from tightfit import fit
    from tightfit.devices.catalogue import find
    from tightfit.diagnosis.diagnosed_run import subject_of_tape
    from tightfit.tape.load import read_tape

    settings = fit.allocator_settings(alloc_conf)
    if target.endswith(".npz"):
        tape = read_tape(target)
        return subject_of_tape(tape, find(device or tape.traced_for), settings)
    card = device or own_card(arguments)
    is_rewritten = not tracing.show_output
    with ProgressLine(f"trace {target}", timeout_seconds=tracing.timeout, is_rewritten=is_rewritten) as line:
        tape, holders = fit.capture_with_holders(
            target,
            device=card,
            arguments=arguments,
            parameters=parameters,
            tracing=tracing,
            on_progress=line.report,
        )
    return subject_of_tape(tape, find(card), settings, holders=holders)
