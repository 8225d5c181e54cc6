"""Names the holders of what a traced program keeps from step to step: a preparation of the trace (`tightfit.capture.trace.Preparation`)."""

import bisect
import collections
import dataclasses
from collections.abc import Callable
from typing import Any

from tightfit.capture.child_process.capture_session import WHEN_TAKEN, CaptureSession
from tightfit.runtime.leaks.holder_search import holders_of_storages
from tightfit.tape import Category, SpanKind

# Of the storages that one operator line has left in many steps.
_MAX_STORAGES_OF_A_LINE = 64


def prepare(_: None) -> Callable[[], dict[str, Any]]:
    """Has holders looked for when the trace has ended; the report has them as plain data, by the number of the storage on the tape."""
    found: dict[str, Any] = {}

    def look(session: CaptureSession) -> None:
        holders = holders_of_storages(_kept_by_steps(session), session.gpu.storages.index_of)
        found.update({str(storage): dataclasses.asdict(holder) for storage, holder in holders.items()})

    WHEN_TAKEN.append(look)
    return lambda: found


def _kept_by_steps(session: CaptureSession) -> dict[int, int]:
    """The storages that outlived the step that allocated them, newest first, with that step; the first step does not count, nor what the last one leaves."""
    recorder = session.recorder
    begins = [operator for _, kind, _, operator in recorder.spans if kind == SpanKind.STEP]
    if len(begins) < 3:
        return {}
    by_line: dict[int, list[int]] = collections.defaultdict(list)
    for storage in sorted(session.gpu.storages.indices(), reverse=True):
        operator = recorder.storages["operator"][storage]
        # States are the optimizer's, and the histories that some of them keep have a bound.
        is_state = recorder.storages["category"][storage] == Category.OPTIMIZER_STATE
        line = int(recorder.operators["line"][operator]) if operator >= 0 else 0
        if begins[1] <= operator < begins[-1] and not is_state and len(by_line[line]) < _MAX_STORAGES_OF_A_LINE:
            by_line[line].append(storage)
    kept = sorted((storage for storages in by_line.values() for storage in storages), reverse=True)
    return {storage: bisect.bisect_right(begins, int(recorder.storages["operator"][storage])) for storage in kept}
