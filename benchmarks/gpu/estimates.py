"""The prediction for a row: a trace on the virtual GPU, in a process that sees no GPU, and its estimate on a device."""

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import Row
from tightfit.allocator.settings import AllocatorSettings
from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.capture.trace import trace
from tightfit.devices.calibration import Calibration
from tightfit.devices.catalogue import find
from tightfit.errors import TightfitError
from tightfit.simulate.peak import estimate_peak

ROOT = Path(__file__).parents[2]
CONTEXT_CAUSE = "CUDA context"


def find_own_packages() -> None:
    """Lets child processes import this package and tightfit from the checkout, with nothing installed."""
    own = [str(ROOT), str(ROOT / "src")]
    inherited = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([*own, *([inherited] if inherited else [])])


def settings_of(row: Row) -> AllocatorSettings:
    """The allocator's settings of a row."""
    return AllocatorSettings.parse("expandable_segments:True" if row.expandable_segments else "")


def estimate(row: Row, device: str, calibration: Calibration | None) -> dict[str, Any]:
    """The peaks with their band, the seconds of a step and those of the estimate; or the fault that kept it from being made."""
    begin = time.perf_counter()
    target = GeneratorFunction(location="benchmarks.gpu.workload", function="train", parameters=row.parameters())
    try:
        tape = trace(target, label=row.name, device=device).tape
        found = estimate_peak(tape, find(device), settings_of(row), calibration)
    except Exception as error:  # noqa: BLE001 - a row that cannot be predicted is a result, and the others go on
        return {"fault": str(error) if isinstance(error, TightfitError) else f"{type(error).__name__}: {error}"}
    without_context = [cause for cause in found.band if cause.cause != CONTEXT_CAUSE]
    return {
        **dataclasses.asdict(found.peak),
        "reserved_low_bytes": found.peak.reserved_bytes - sum(cause.less_bytes for cause in without_context),
        "reserved_high_bytes": found.peak.reserved_bytes + sum(cause.more_bytes for cause in without_context),
        "seconds_per_step": found.seconds_per_step,
        "num_operators": len(tape.operators),
        "elapsed_seconds": round(time.perf_counter() - begin, 2),
    }
