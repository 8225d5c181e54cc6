"""The accuracy of estimates: published measurements on real GPUs beside the output of `tightfit estimate` for the same loops.

    python -m venv /tmp/accuracy && . /tmp/accuracy/bin/activate
    pip install torch==2.13.0
    pip install -r benchmarks/requirements-accuracy.txt
    pip install --no-deps -r benchmarks/requirements-accuracy-without-dependencies.txt
    pip install --no-deps -e .
    python -m benchmarks.accuracy rtx a100 timm recordings --csv docs/accuracy

The T4 rows were measured with a later transformers: build a second environment with
benchmarks/requirements-accuracy-t4.txt and give its interpreter with --python. torch itself is of the version under
test, not of the measurement's. Rows come from --data; without that folder nothing runs, and the reason is printed.
Exit status: 0 when every group ran, 1 when some row could not be estimated, 2 for wrong arguments.
"""

import argparse
import datetime
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.accuracy_rows import GROUPS, Row
from benchmarks.accuracy_run import ROOT, compare, estimate_command, parameter_options, run_all, slopes
from benchmarks.accuracy_table import Comparison, report, summarise, summary_line, write_csv

PACKAGES = ("torch", "torchvision", "transformers", "timm", "tightfit")
# The optimizer's state is there from the second step on; more steps show these estimators nothing new.
BASELINE_STEPS = 2


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}; default: all")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="where measurements lie")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that runs the estimates")
    parser.add_argument("--jobs", type=int, default=1, help="estimates at a time")
    parser.add_argument("--match", default="", help="only rows whose name contains this")
    parser.add_argument("--every", type=int, default=1, help="only every n-th row of a group, or model of a sweep")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that one estimate may take")
    parser.add_argument("--csv", type=Path, help="folder that receives GROUP.csv")
    parser.add_argument(
        "--tapes", type=Path, help="folder that keeps traced runs, to estimate from them without tracing"
    )
    parser.add_argument("--baselines", action="store_true", help="also run simpler estimators, where they run")
    parser.add_argument("--list", action="store_true", help="print the commands and run nothing")
    parsed = parser.parse_args(words)
    unknown = sorted(set(parsed.groups) - set(GROUPS))
    if unknown:
        parser.error(f"no group is called {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    return parsed


def every_nth(rows: Sequence[Row], step: int) -> list[Row]:
    """Every `step`-th row; of a sweep every `step`-th model with all of its batch sizes, which a slope needs."""
    if rows and rows[0].group == "timm":
        models = set(list(dict.fromkeys(row.parameters["model"] for row in rows))[::step])
        return [row for row in rows if row.parameters["model"] in models]
    return list(rows[::step])


def versions(python: str) -> str:
    """The versions that the interpreter `python` has of what matters to an estimate."""
    program = (
        "import importlib.metadata as m, platform, sys\n"
        "print('python', platform.python_version(), end='')\n"
        "for name in sys.argv[1:]:\n"
        "    try: print(',', name, m.version(name), end='')\n"
        "    except m.PackageNotFoundError: pass\n"
    )
    return subprocess.run([python, "-c", program, *PACKAGES], capture_output=True, text=True, check=True).stdout


def baseline_figures(rows: Sequence[Row], options: argparse.Namespace) -> list[dict[str, float]]:
    """The figures of simpler estimators for each row; an estimator that fails on a row is left out there."""
    module = (options.python, "-m", "benchmarks.accuracy_baselines")
    commands = [
        (*module, row.workload, *parameter_options(row), "--steps", str(min(row.num_steps, BASELINE_STEPS)))
        for row in rows
    ]
    answers = run_all(commands, options.jobs, options.timeout)
    figures = []
    for command in commands:
        content = answers[command].content or {}
        figures.append({name: float(value) for name, value in content.items() if isinstance(value, int | float)})
    return figures


def run_group(group: str, rows: Sequence[Row], options: argparse.Namespace) -> list[Comparison]:
    """Estimates every row of a group, prints its table and, where asked, writes its CSV file."""
    commands = [tuple(estimate_command(row, options.python, options.tapes)) for row in rows]
    if options.list:
        print("\n".join(" ".join(command) for command in dict.fromkeys(commands)))
        return []
    others: Sequence[dict[str, float]] = [{} for _ in rows]
    if options.baselines:
        others = baseline_figures(rows, options)
    answers = run_all(commands, options.jobs, options.timeout)
    compared = [compare(row, answers[command], own) for row, command, own in zip(rows, commands, others, strict=True)]
    shown = slopes(rows, compared) if group == "timm" else compared
    print(report(group, shown), end="\n\n", flush=True)
    if options.csv:
        remarks = {
            "command": f"python -m benchmarks.accuracy {group}{' --baselines' if options.baselines else ''}",
            "versions": versions(options.python),
            "host": f"{platform.machine()}, no GPU used; {datetime.date.today().isoformat()}",
            "summary": summary_line(group, summarise(shown)),
        }
        if any(row.baseline_bytes for row in shown):
            whole = summarise([row.with_baseline() for row in shown])
            remarks["summary_with_baseline"] = summary_line(group, whole)
        write_csv(options.csv / f"{group}.csv", [*shown, *compared] if group == "timm" else compared, remarks)
    return shown


def main(words: Sequence[str] | None = None) -> int:
    """Runs the benchmark; see the module's docstring."""
    options = arguments(sys.argv[1:] if words is None else words)
    if not options.data.is_dir():
        print(f"skipped: the folder of measurements {options.data} is absent; give one with --data", file=sys.stderr)
        return 0
    compared: list[Comparison] = []
    for group in options.groups or GROUPS:
        rows = every_nth([row for row in GROUPS[group](options.data) if options.match in row.name], options.every)
        if rows:
            compared += run_group(group, rows, options)
    if compared:
        print(summary_line("all groups", summarise(compared)))
        print(json.dumps({"versions": versions(options.python)}), file=sys.stderr)
    return int(any(row.fault for row in compared))


if __name__ == "__main__":
    sys.exit(main())
