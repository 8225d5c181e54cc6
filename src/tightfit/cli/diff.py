"""`tightfit diff`: compares two runs, recorded or estimated, and finds where they first diverge."""

import json as jsonlib
import sys

from tightfit.cli.arguments.options import AS_USUAL, TraceOptions
from tightfit.cli.shared.subjects import is_finished, subject_of


def diff(a: str, b: str, /, *, device: str | None = None, json: bool = False, tracing: TraceOptions = AS_USUAL) -> int:
    """Compare two runs: what grew, by line and category, step by step, and the first allocation that differs.

    Parameters
    ----------
    a
        A recording (torch.cuda.memory._dump_snapshot); a trace that estimate --save-tape wrote; or anything that estimate takes.
    b
        The other run; where B has more than A, the change has a plus.
    device
        The GPU for a run that is not a recording. Default: the one that it was traced for, or the GPU of this machine. Of a recording with several GPUs: the one to show, such as cuda:1; by default the one that ran out of memory.
    json
        Print one JSON object.
    """
    # What is given is for the run that is traced, where only one of them is.
    is_mixed = is_finished(a) != is_finished(b)
    subjects = [
        subject_of(target, device=device, tracing=AS_USUAL if is_mixed and is_finished(target) else tracing)
        for target in (a, b)
    ]
    # Imported late, like all that needs numpy, so that usage errors and --help take no time.
    from tightfit.diagnosis.difference import difference

    found = difference(*subjects)
    if json:
        sys.stdout.write(jsonlib.dumps(found.to_json()) + "\n")
    else:
        from tightfit.reports.text.run_difference import write_difference

        write_difference(found)
    return 0
