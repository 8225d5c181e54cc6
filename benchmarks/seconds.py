"""Predicted against measured seconds: single kernels, whole steps of timm's models and of transformers (`python -m benchmarks.seconds`).

Measurements are read where they stand beside the checkout (`../shared/data`); the steps are traced once each and kept in `--tapes`. Single kernels need no
trace. `--models N` takes N of timm's models per mode, in the order of the hash of their names: the first 65 of training and 44 of inference were looked at while the constants
were chosen, the others were not (`held`). Nor were transformers on NVIDIA cards; what AMD cards reach in float32 was chosen on theirs.
"""

import argparse
import csv
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.seconds_kernels import kernel_rows
from benchmarks.seconds_rows import SecondsRow, ordered_right
from benchmarks.seconds_steps import step_rows

DATA = Path(__file__).parents[1].parent / "shared" / "data"
OUTPUT = Path(__file__).parents[1] / "docs" / "seconds.csv"
_NUM_WORST = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table and writes `docs/seconds.csv`; 2 where there are no measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--tapes", type=Path, help="folder of traced steps; without it single kernels alone")
    parser.add_argument("--models", type=int, default=88)
    parser.add_argument("--no-trace", action="store_true", help="take the steps that are in the folder, trace no other")
    parser.add_argument("--csv", type=Path, default=OUTPUT)
    options = parser.parse_args(arguments)
    if not options.data.is_dir():
        print(f"no measurements in {options.data}: name their folder with --data", file=sys.stderr)
        return 2
    groups = list(kernel_rows(options.data))
    steps: list[SecondsRow] = []
    if options.tapes is not None:
        steps = list(step_rows(options.data, options.tapes, num_models=options.models, may_trace=not options.no_trace))
    print_groups([*groups, *steps])
    if steps:
        print_worst(steps)
        write(steps, options.csv)
    return 0


def print_groups(rows: Sequence[SecondsRow]) -> None:
    """One line per group: errors of ours, of the roofline, and of NeuSight where it is in the data."""
    print(
        f"{'group':44} {'rows':>6} {'median':>7} {'P90':>7} {'bias':>7} {'roofline':>9} {'NeuSight':>9} {'ordered':>8} {'in range':>9} {'width':>7}"
    )
    for group in dict.fromkeys(row.group for row in rows):
        own = [row for row in rows if row.group == group]
        errors = np.array([row.error for row in own])
        roofline = np.median([abs(row.roofline_seconds / row.measured_seconds - 1) for row in own])
        other = [abs(row.neusight_seconds / row.measured_seconds - 1) for row in own if row.neusight_seconds]
        ranged = [row for row in own if row.high_seconds]
        held = f"{np.mean([row.is_in_range for row in ranged]):9.1%}" if ranged else ""
        width = f"{np.median([row.high_seconds / row.low_seconds for row in ranged]):7.2f}" if ranged else ""
        print(
            f"{group:44} {len(own):6} {np.median(np.abs(errors)):7.1%} {np.quantile(np.abs(errors), 0.9):7.1%} {np.median(errors):+7.1%}"
            f" {roofline:9.1%} {f'{np.median(other):9.1%}' if other else '':>9} {ordered_right(own):8.1%} {held:>9} {width:>7}"
        )


def print_worst(rows: Sequence[SecondsRow]) -> None:
    """The rows with the largest errors."""
    for row in sorted(rows, key=lambda row: -abs(row.error))[:_NUM_WORST]:
        print(f"{row.error:+7.1%}  {row.measured_seconds * 1e3:9.1f} ms  {row.device}  {row.name}")


def write(rows: Sequence[SecondsRow], path: Path) -> None:
    """The rows as CSV, in milliseconds."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            [
                "group",
                "device",
                "name",
                "measured_ms",
                "predicted_ms",
                "roofline_ms",
                "neusight_ms",
                "low_ms",
                "high_ms",
            ]
        )
        for row in rows:
            figures = [f"{seconds * 1e3:.4g}" if seconds else "" for seconds in dataclasses.astuple(row)[3:]]
            writer.writerow([row.group, row.device, row.name, *figures])


if __name__ == "__main__":
    sys.exit(main())
