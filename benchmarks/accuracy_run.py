"""Runs `tightfit estimate` on one row of the accuracy benchmark, as a user would, and compares its figures with the measured one.

Each distinct command runs once in a process of its own, with the interpreter whose library versions match those of the
measurement; two figures of one run share it.
"""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy_rows import Row
from benchmarks.accuracy_table import Comparison, slope

ROOT = Path(__file__).parents[1]
EXIT_FITS, EXIT_DOES_NOT_FIT = 0, 1
CONTEXT_CAUSE = "CUDA context"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a command printed as JSON, or the last line that it wrote when it failed, and its seconds."""

    content: Mapping[str, Any] | None
    fault: str
    elapsed_seconds: float


def parameter_options(row: Row) -> list[str]:
    """The row's parameters as `-p name=value` options."""
    return [part for name, value in row.parameters.items() for part in ("-p", f"{name}={value}")]


def tape_path(row: Row, folder: Path) -> Path:
    """Where the traced run of a row is kept, by workload, parameters, device and steps."""
    identity = json.dumps([row.workload, dict(row.parameters), row.device, row.num_steps])
    return folder / f"{row.group}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.npz"


def estimate_command(row: Row, python: str, tapes: Path | None = None) -> list[str]:
    """The command that estimates `row`; with `tapes`, from the run kept in that folder, or so that it is kept there."""
    options = ["--device", row.device, "--json"]
    if row.calibration:
        options += ["--calibration", row.calibration]
    kept = None if tapes is None else tape_path(row, tapes)
    if kept is not None and kept.exists():
        return [python, "-m", "tightfit", "estimate", str(kept), *options]
    if kept is not None:
        options += ["--save-tape", str(kept)]
    traced = [row.workload, *parameter_options(row), "--steps", str(row.num_steps)]
    return [python, "-m", "tightfit", "estimate", *traced, *options]


def run_json(command: Sequence[str], timeout_seconds: float) -> Answer:
    """Runs `command` in the root of the checkout, where the workloads' package is found, and reads its JSON."""
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "NO_COLOR": "1", "TOKENIZERS_PARALLELISM": "false"},
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(content=None, fault=f"not done in {timeout_seconds:.0f} s", elapsed_seconds=timeout_seconds)
    elapsed = time.perf_counter() - start
    if done.returncode in {EXIT_FITS, EXIT_DOES_NOT_FIT} and done.stdout.lstrip().startswith("{"):
        return Answer(content=json.loads(done.stdout), fault="", elapsed_seconds=elapsed)
    words = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
    return Answer(content=None, fault=f"exit {done.returncode}: {words[:160]}", elapsed_seconds=elapsed)


def run_all(commands: Sequence[tuple[str, ...]], jobs: int, timeout_seconds: float) -> dict[tuple[str, ...], Answer]:
    """The answer to each distinct command, `jobs` of them at a time; prints progress on stderr."""
    distinct = list(dict.fromkeys(commands))

    def run(command: tuple[str, ...]) -> Answer:
        answer = run_json(command, timeout_seconds)
        print(f"{answer.elapsed_seconds:6.1f} s  {' '.join(command[3:])}  {answer.fault}", file=sys.stderr, flush=True)
        return answer

    with ThreadPoolExecutor(max_workers=jobs) as pool:
        return dict(zip(distinct, pool.map(run, distinct), strict=True))


def compare(row: Row, answer: Answer, others: Mapping[str, float]) -> Comparison:
    """The row's measured figure beside the estimate of it.

    The estimate's band is about the whole device. Around the reserved peak it is without its first cause, the context of
    the process, which is no part of that figure. The allocated peak has no band.
    """
    shared: dict[str, Any] = {
        "group": row.group,
        "name": row.name,
        "figure": row.figure,
        "measured_bytes": row.measured_bytes,
        "baseline_bytes": row.baseline_bytes,
        "excluded": row.excluded,
        "fault": answer.fault,
        "elapsed_seconds": answer.elapsed_seconds,
        "others": {**row.published, **others},
    }
    if answer.content is None:
        return Comparison(**shared)
    peak, steps = answer.content["peak"], answer.content["steps"]
    estimated = {
        "reserved": peak["reserved_bytes"],
        "device": peak["device_bytes"],
        "allocated": peak["allocated_bytes"],
        "step_allocated": steps[-1]["peak_allocated_bytes"],
    }[row.figure]
    if row.figure.endswith("allocated"):
        return Comparison(**shared, estimated_bytes=estimated)
    causes = [b for b in answer.content["band"] if row.figure == "device" or b["cause"] != CONTEXT_CAUSE]
    return Comparison(
        **shared,
        estimated_bytes=estimated,
        low_bytes=estimated - sum(cause["less_bytes"] for cause in causes),
        high_bytes=estimated + sum(cause["more_bytes"] for cause in causes),
    )


def slopes(rows: Sequence[Row], timeline: Sequence[Comparison]) -> list[Comparison]:
    """One comparison per model of a sweep: bytes per item of the batch, least squares, both over the same batches.

    Batches that were excluded stay out; a model that has fewer than two left has no slope and is not listed.
    """
    compared = []
    for model in dict.fromkeys(str(row.parameters["model"]) for row in rows):
        own = [
            (row, level)
            for row, level in zip(rows, timeline, strict=True)
            if row.parameters["model"] == model and not row.excluded
        ]
        if len(own) < 2:
            continue
        measured = slope([(float(row.parameters["batch_size"]), float(row.measured_bytes)) for row, _ in own])
        faults = [level.fault for _, level in own if level.fault]
        points = [
            (float(row.parameters["batch_size"]), level.estimated_bytes)
            for row, level in own
            if level.estimated_bytes is not None
        ]
        batches = ", ".join(str(row.parameters["batch_size"]) for row, _ in own)
        compared.append(
            Comparison(
                group="timm",
                name=f"{model} per item, batches {batches}",
                figure="slope",
                measured_bytes=measured,
                estimated_bytes=None if faults else slope(points),
                fault=faults[0] if faults else "",
                elapsed_seconds=sum(level.elapsed_seconds for _, level in own),
            )
        )
    return compared
