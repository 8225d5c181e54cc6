"""`tightfit doctor`: memory at the peak by category and allocation site, growth, fragmentation and suggestions, for one run."""

import json as jsonlib
import sys
from typing import Annotated

from cyclopts import Parameter

from tightfit.cli.arguments.options import AS_USUAL, TraceOptions
from tightfit.cli.shared.subjects import subject_of
from tightfit.diagnosis.out_of_memory_error import OutOfMemoryText, error_in
from tightfit.errors import UsageError
from tightfit.reports.redacted import redacted


def doctor(
    target: str,
    /,
    *arguments: Annotated[str, Parameter(show=False)],
    device: str | None = None,
    parameter: Annotated[tuple[str, ...], Parameter(consume_multiple=False, alias="-p")] = (),
    alloc_conf: str | None = None,
    seconds: float = 10.0,
    redact: bool = False,
    json: bool = False,
    tracing: TraceOptions = AS_USUAL,
) -> int:
    """Explain the memory of one run: categories and allocation sites at the peak, growth, fragmentation, suggestions.

    Parameters
    ----------
    target
        A recording (torch.cuda.memory._dump_snapshot); the text of an out-of-memory error, or a log that ends with one; a trace that estimate --save-tape wrote; or a script (its own arguments after --), a generator function or a Hugging Face config, as estimate takes it, which is traced first; growth needs at least 3 steps.
    device
        The GPU for a run that is not a recording. Default: the one that it was traced for, or the GPU of this machine. Of a recording with several GPUs: the one to show, such as cuda:1; by default the one that ran out of memory.
    parameter
        NAME=VALUE, a keyword argument of the generator function; repeatable.
    alloc_conf
        Allocator settings for a run that is not a recording, as in PYTORCH_CUDA_ALLOC_CONF. Default: that variable.
    seconds
        Time limit of the search for better allocator settings, 10 if not given.
    redact
        Write ~ in place of home folders in every path, for a report that is sent to somebody.
    json
        Print one JSON object.
    """
    # Not `seconds <= 0`: this refuses NaN too.
    if not seconds > 0:
        raise UsageError(f"--seconds {seconds:g} is not a valid search time; give a number above 0")
    if error := error_in(target):
        return _explained(error, json=json)
    subject = subject_of(
        target, device=device, arguments=arguments, parameters=parameter, alloc_conf=alloc_conf, tracing=tracing
    )
    # Imported after the arguments are checked: numpy and torch-free analysis take most of the start-up time.
    from tightfit.diagnosis.diagnose import diagnose

    diagnosis = diagnose(subject, seconds=seconds)
    diagnosis = redacted(diagnosis) if redact else diagnosis
    if json:
        sys.stdout.write(jsonlib.dumps(diagnosis.to_json()) + "\n")
    else:
        from tightfit.reports.text.diagnosis import write_diagnosis

        write_diagnosis(diagnosis)
    return 0


def _explained(error: OutOfMemoryText, *, json: bool) -> int:
    if json:
        sys.stdout.write(jsonlib.dumps(error.to_json()) + "\n")
    else:
        from tightfit.reports.text.out_of_memory import write_error

        write_error(error)
    return 0
