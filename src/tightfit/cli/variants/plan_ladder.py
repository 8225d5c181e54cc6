"""`tightfit plan --ladder N`: several plans, each of which holds less than the one before, in files of their own."""

import json as jsonlib
import sys
from pathlib import Path
from typing import Any

from tightfit.cli.shared.progress import ProgressLine
from tightfit.errors import UsageError
from tightfit.output_files import check_outputs


def files_of(output: Path | None, num_plans: int, *, goes: bool) -> list[Path]:
    """The files of the plans: `plan-1.json`, `plan-2.json` for `plan.json`.

    Raises:
        UsageError: there is no `output`, too few plans are asked for, or it does not go with the other options.
    """
    if not goes:
        raise UsageError(
            "--ladder makes several plans for one GPU: it goes with neither --search, --as-code, --redact nor --gpus"
        )
    if output is None:
        raise UsageError(
            "--ladder writes a file for each plan: give -o plan.json for plan-1.json, plan-2.json and so on"
        )
    if num_plans < 2:
        raise UsageError(f"--ladder {num_plans}: give how many plans are to be made, two or more")
    files = [output.with_name(f"{output.stem}-{number}{output.suffix}") for number in range(1, num_plans + 1)]
    for each in files:
        check_outputs({"--output": each})
    return files


def plan_ladder(target: str, device: str, line: ProgressLine, *, files: list[Path], json: bool, **settings: Any) -> int:
    """Makes, writes and prints the plans. Returns the exit code: 1 if nothing fits."""
    from tightfit.fit.ladder import ladder
    from tightfit.reports.plans import write_plan
    from tightfit.reports.text.ladder_table import write_ladder

    with line:
        found = ladder(target, device, num_plans=len(files), on_progress=line.report, **settings)
    written = files[: len(found)]
    if found[0].fits:
        for plan, path in zip(found, written, strict=True):
            plan.save(path)
    if json:
        sys.stdout.write(jsonlib.dumps({"schema": 1, "plans": [plan.to_json() for plan in found]}) + "\n")
    elif not found[0].fits:
        write_plan(found[0], elapsed_seconds=0.0)
    else:
        write_ladder(found, written, target=target)
    return 0 if found[0].fits else 1
