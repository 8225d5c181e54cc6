"""tightfit beside what a user would pick instead, on the same workloads: how far each is off, and how long each takes to answer.

    python -m benchmarks.side_by_side published --python ENVIRONMENT/bin/python --every 4 --csv docs/accuracy/side_by_side.csv
    python -m benchmarks.side_by_side gpu --results results/results.jsonl --csv docs/accuracy/side_by_side_gpu.csv

`published` takes rows of the accuracy benchmark, whose peaks others measured (its environments and folder of measurements are needed); `gpu` takes what
`python -m benchmarks.gpu` measured on a card. Each tool runs in a process of its own with the interpreter --python, and its seconds are those of the
process. The table says so where a tool is not installed there, or fails on a workload.
"""

import argparse
import csv
import datetime
import json
import math
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.accuracy_rows import GROUPS, Row
from benchmarks.accuracy_run import ROOT, estimate_command, parameter_options, run_json
from benchmarks.accuracy_table import percentile
from benchmarks.side_by_side_tools import EXIT_ABSENT, TOOLS

OURS = "tightfit"
PUBLISHED_GROUPS = ("rtx", "t4")
_GPU_WORKLOAD = "benchmarks/gpu/workload.py:train"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A workload with its measured reserved peak, and the command of each tool for it."""

    name: str
    measured_bytes: int
    commands: Mapping[str, list[str]]
    known: Mapping[str, "Answer"] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The estimate of a tool for a case, or the reason why there is none."""

    num_bytes: float | None
    seconds: float
    fault: str = ""


def published_cases(groups: Sequence[str], data: Path, pythons: Mapping[str, str], every: int) -> list[Case]:
    """Every n-th reserved peak of the groups that the accuracy benchmark counts."""
    cases = []
    for group in groups:
        rows = [row for row in GROUPS[group](data) if row.figure == "reserved" and not row.excluded]
        cases += [_published(row, pythons[group]) for row in rows[:: every if group == "rtx" else 1]]
    return cases


def _published(row: Row, python: str) -> Case:
    others = {tool: tool_command(python, tool, row.workload, parameter_options(row)) for tool in TOOLS}
    return Case(
        name=f"{row.group} {row.name}",
        measured_bytes=row.measured_bytes + row.baseline_bytes,
        commands={OURS: estimate_command(row, python), **others},
    )


def gpu_cases(results: Path, python: str) -> list[Case]:
    """Every row that `benchmarks.gpu` measured without running out of memory; our own estimate was made there."""
    cases = []
    for result in map(json.loads, results.read_text(encoding="utf-8").splitlines()):
        measured, estimate = result.get("measured", {}), result.get("estimate", {})
        if not measured.get("reserved_bytes") or measured.get("failed"):
            continue
        parameters = {key: value for key, value in result["row"].items() if key != "expandable_segments"}
        options = ["--json-parameters", json.dumps(parameters)]
        own = Answer(
            num_bytes=estimate.get("reserved_bytes"),
            seconds=estimate.get("elapsed_seconds", math.nan),
            fault=estimate.get("fault", ""),
        )
        commands = {tool: tool_command(python, tool, _GPU_WORKLOAD, options) for tool in TOOLS}
        cases.append(
            Case(
                name=result["name"],
                measured_bytes=measured["reserved_bytes"],
                commands=commands,
                known={OURS: own},
            )
        )
    return cases


def tool_command(python: str, tool: str, workload: str, options: Sequence[str]) -> list[str]:
    """The command that asks one of the other tools."""
    return [python, "-m", "benchmarks.side_by_side_tools", tool, workload, *options]


def ask(case: Case, tool: str, timeout_seconds: float) -> Answer:
    """Runs a tool on a case."""
    if tool in case.known:
        return case.known[tool]
    found = run_json(case.commands[tool], timeout_seconds)
    if found.content is None:
        absent = found.fault.startswith(f"exit {EXIT_ABSENT}: not installed")
        return Answer(num_bytes=None, seconds=found.elapsed_seconds, fault="not installed" if absent else found.fault)
    said = found.content["peak"]["reserved_bytes"] if tool == OURS else found.content["bytes"]
    return Answer(num_bytes=said, seconds=found.elapsed_seconds)


def summarise(cases: Sequence[Case], answers: Mapping[tuple[str, str], Answer]) -> list[dict[str, Any]]:
    """A line for each tool: cases answered, errors, the share that it puts below the need, and seconds."""
    lines = []
    for tool in (OURS, *TOOLS):
        own = [(case, answers[case.name, tool]) for case in cases]
        errors = [answer.num_bytes / case.measured_bytes - 1 for case, answer in own if answer.num_bytes is not None]
        faults = [answer.fault for _, answer in own if answer.num_bytes is None]
        sizes = list(map(abs, errors))
        lines.append(
            {
                "tool": tool,
                "answered": f"{len(errors)} of {len(cases)}",
                "median": percentile(sizes, 0.5),
                "90th": percentile(sizes, 0.9),
                "95th": percentile(sizes, 0.95),
                "under": sum(error < 0 for error in errors) / len(errors) if errors else math.nan,
                "seconds": percentile([answer.seconds for _, answer in own if answer.num_bytes is not None], 0.5),
                "remark": max(set(faults), key=faults.count) if faults else "",
            }
        )
    return lines


def as_text(lines: Sequence[Mapping[str, Any]]) -> str:
    """The summary as a table in Markdown."""
    head = "| tool | answered | median | 90th percentile | 95th | too low | seconds | remark |"
    rows = []
    for line in lines:
        shares = ["-" if math.isnan(line[key]) else f"{100 * line[key]:.1f} %" for key in ("median", "90th", "95th")]
        under = "-" if math.isnan(line["under"]) else f"{100 * line['under']:.0f} %"
        seconds = "-" if math.isnan(line["seconds"]) else f"{line['seconds']:.1f}"
        remark = line["remark"].replace("|", "/")
        rows.append(f"| {line['tool']} | {line['answered']} | {' | '.join(shares)} | {under} | {seconds} | {remark} |")
    return "\n".join([head, "|---" * 8 + "|", *rows])


def write_csv(
    path: Path, cases: Sequence[Case], answers: Mapping[tuple[str, str], Answer], remarks: Mapping[str, str]
) -> None:
    """Every answer, below the remarks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        for name, text in remarks.items():
            file.write(f"# {name}: {text}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["workload", "measured_bytes", "tool", "bytes", "error", "seconds", "fault"])
        for case in cases:
            for tool in (OURS, *TOOLS):
                answer = answers[case.name, tool]
                error = "" if answer.num_bytes is None else f"{answer.num_bytes / case.measured_bytes - 1:.5f}"
                said = "" if answer.num_bytes is None else f"{answer.num_bytes:.0f}"
                cells = [case.name, case.measured_bytes, tool, said, error, f"{answer.seconds:.2f}", answer.fault]
                writer.writerow(cells)


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.side_by_side", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("source", choices=("published", "gpu"))
    parser.add_argument("--python", default=sys.executable, help="the interpreter that runs the tools")
    parser.add_argument("--python-t4", help="the same for the T4 rows, which need a later transformers")
    parser.add_argument("--groups", default=",".join(PUBLISHED_GROUPS), help="of the accuracy benchmark")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="where measurements lie")
    parser.add_argument("--every", type=int, default=1, help="only every n-th of the RTX rows")
    parser.add_argument("--results", type=Path, help="results.jsonl of benchmarks.gpu")
    parser.add_argument("--timeout", type=float, default=300, help="seconds that one answer may take")
    parser.add_argument("--csv", type=Path, help="file that receives every answer")
    parsed = parser.parse_args(words)
    if parsed.source == "gpu" and (parsed.results is None or not parsed.results.is_file()):
        parser.error("gpu needs --results, a results.jsonl that benchmarks.gpu wrote")
    return parsed


def main(words: Sequence[str] | None = None) -> int:
    """Runs the comparison; see the module's docstring."""
    options = arguments(sys.argv[1:] if words is None else words)
    if options.source == "gpu":
        cases = gpu_cases(options.results, options.python)
    elif not options.data.is_dir():
        print(f"skipped: the folder of measurements {options.data} is absent; give one with --data", file=sys.stderr)
        return 0
    else:
        pythons = {"rtx": options.python, "t4": options.python_t4 or options.python}
        cases = published_cases(options.groups.split(","), options.data, pythons, options.every)
    answers = {}
    for case in cases:
        for tool in (OURS, *TOOLS):
            answer = answers[case.name, tool] = ask(case, tool, options.timeout)
            shown = answer.fault or f"{100 * ((answer.num_bytes or 0) / case.measured_bytes - 1):+.1f} %"
            print(f"{answer.seconds:6.1f} s  {tool:16} {case.name}: {shown}", file=sys.stderr, flush=True)
    text = as_text(summarise(cases, answers))
    print(text)
    if options.csv:
        remarks = {
            "command": f"python -m benchmarks.side_by_side {options.source} (interpreters and folders left out)",
            "date": datetime.date.today().isoformat(),
            "host": f"{platform.machine()}, python {platform.python_version()}",
        }
        write_csv(options.csv, cases, answers, remarks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
