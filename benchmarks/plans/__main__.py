"""The quality of plans, measured on a machine without a GPU.

    python -m benchmarks.plans [--only NAME ...] [--csv docs/plans.csv] [--tapes FOLDER]    the grid
    python -m benchmarks.plans optimality | headlines | ladder                              one of the other parts

A table that exists is continued: workloads that are in it are kept, but for those named by `--only`. Tapes are kept in the folder, and serve
again as long as the techniques are the same.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.plans import grid, headlines, ladder, optimality, table
from benchmarks.plans.workloads import WORKLOADS, named
from tightfit.errors import TightfitError


def run_grid(names: Sequence[str], path: Path, folder: Path | None) -> int:
    """Computes the rows of the workloads that are missing or named; 1 if a plan does not meet its requirements.

    A workload that fails is reported and left out; a later run tries it again.
    """
    chosen = [named(name) for name in names] or list(WORKLOADS)
    done = [row for row in table.load(path) if row.workload not in names]
    order = {workload.name: index for index, workload in enumerate(WORKLOADS)}
    print(*table.lines([]), sep="\n")
    failed = []
    for workload in chosen:
        if any(row.workload == workload.name for row in done):
            continue
        made = []
        try:
            for row in grid.rows_of(workload, folder):
                made.append(row)
                print(list(table.lines([row]))[1], flush=True)
        except (TightfitError, AssertionError) as error:
            print(f"{workload.name} failed: {error}", flush=True)
            failed.append(workload.name)
            continue
        done = sorted([*done, *made], key=lambda row: order[row.workload])
        table.save(path, done)
    print(table.verdict(done), *(f"{name} failed" for name in failed), sep="; ")
    return int(bool(failed) or any(row.wrong for row in done if row.kind == "plan"))


def main() -> int:
    """Runs one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", default="grid", choices=("grid", "optimality", "headlines", "ladder"))
    parser.add_argument("--only", nargs="*", default=[], help="names of workloads")
    parser.add_argument("--csv", type=Path, default=Path("docs/plans.csv"))
    parser.add_argument("--tapes", type=Path, default=None, help="a folder for tapes")
    arguments = parser.parse_args()
    if arguments.part == "grid":
        return run_grid(arguments.only, arguments.csv, arguments.tapes)
    made = {
        "optimality": lambda: optimality.lines(arguments.tapes, arguments.only),
        "headlines": lambda: headlines.lines(arguments.tapes),
        "ladder": lambda: ladder.lines(arguments.tapes),
    }
    for line in made[arguments.part]():
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
