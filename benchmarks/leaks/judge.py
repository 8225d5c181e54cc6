"""Runs one script and judges what is said of it."""

import dataclasses
import gc
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.leaks.cycles import CYCLE
from benchmarks.leaks.script import CLEAN, LEAKING, Script

SILENT = "nothing"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What was said of a script, and whether it is right."""

    name: str
    cause: str
    is_right: bool
    said: str


def judged(name: str) -> Judged:
    """Runs a script and judges it. All that is said has to be right: a script with two lists may be said to have two leaks."""
    script = next(script for script in (*LEAKING, *CLEAN) if script.name == name)
    try:
        found = _on_a_virtual_gpu(script) if script.is_virtual else _on_the_host(script)
    except Exception as error:  # noqa: BLE001 - a row of the table
        return Judged(name=name, cause="failed", is_right=False, said=f"{type(error).__name__}: {error}"[:200])
    texts = [
        f"{leak['cause']} at {leak['where'].rpartition('/')[2]}: {leak['holder']['path'] or '-'}" for leak in found
    ]
    is_right = bool(found) and all(_is_right(script, leak) for leak in found) if script.cause else not found
    return Judged(
        name=script.name,
        cause=", ".join(leak["cause"] for leak in found),
        is_right=is_right,
        said="; ".join(texts) or SILENT,
    )


def _is_right(script: Script, leak: dict[str, Any]) -> bool:
    file, _, line = leak["where"].rpartition(":")
    is_placed = Path(file).name == script.file.name and int(line or 0) in script.lines if script.lines else not file
    path = leak["holder"]["path"]
    return leak["cause"] == script.cause and is_placed and (script.holder in path if script.holder else not path)


def _on_the_host(script: Script) -> list[dict[str, Any]]:
    import tightfit

    # Python's collector is off where cycles leak, as in trainers that collect by hand every so many steps:
    # with so few objects per step it would run at any time.
    if script.cause == CYCLE:
        gc.disable()
    # torch warns of a cycle that create_graph makes, which is what one of the scripts is about.
    warnings.simplefilter("ignore")
    try:
        with tightfit.leaks(quiet=True) as found:
            steps = script.function("cpu")
            for _ in islice(steps, script.steps):
                found.step()
    finally:
        gc.enable()
    if found.report.note:
        raise RuntimeError(found.report.note)
    return [leak.to_json() for leak in found.leaks]


def _on_a_virtual_gpu(script: Script) -> list[dict[str, Any]]:
    from tightfit.capture.trace_settings import TraceSettings
    from tightfit.cli.shared.subjects import subject_of
    from tightfit.diagnosis.diagnose import diagnose

    tracing = TraceSettings(steps=script.steps)
    target = f"benchmarks.leaks.{script.file.stem}:{script.name}"
    subject = subject_of(target, device="RTX 4090", parameters=("device=cuda",), tracing=tracing)
    return [leak.to_json() for leak in diagnose(subject, seconds=1).leaks]
