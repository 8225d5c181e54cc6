"""How much of what fragmentation wastes the tuner recovers: on twenty synthetic workloads, and on recordings of real runs.

python -m benchmarks.tuning [--seconds S] [--csv docs/tuning.csv] [RECORDING ...]      without recordings: those beside the checkout, where there are any

Each synthetic workload is tuned with one seed, and the recommendation is then tried on another seed of the same workload, which the tuner has not seen.
"""

import argparse
import csv
import dataclasses
import statistics
import tempfile
from pathlib import Path

from benchmarks.tuning_workloads import WORKLOADS, recording_of
from tightfit.recordings.read import Recording, read_recording
from tightfit.tuning.search_settings import Tuning, tune
from tightfit.units import MIB

DEFAULT_SECONDS = 30.0
_SEED, _OTHER_SEED = 1, 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row of the table; memory in MiB, shares of what the default reserves above the peak of allocated bytes."""

    workload: str
    events: int
    live_mib: float
    default_mib: float
    recommended: str
    recommended_mib: float
    recovered: float
    expandable_recovered: float
    best_recovered: float
    unseen_recovered: float | None
    unseen_expandable: float | None
    static_mib: float
    static_is_optimal: bool
    trials: int
    seconds: float


def line(name: str, recording: Recording, unseen: Recording | None, seconds: float) -> Line:
    """Tunes for one recording. The process ends if the recommendation is worse than the default."""
    tuning = tune(recording, alloc_conf="expandable_segments:True", seconds=seconds)
    chosen = tuning.recommended
    if chosen is None or chosen.peak_reserved_bytes > tuning.default.peak_reserved_bytes or tuning.given is None:
        raise SystemExit(f"{name}: what was recommended is worse than the default")
    return Line(
        workload=name,
        events=sum(device.num_events for device in recording.devices),
        live_mib=tuning.live_bytes / MIB,
        default_mib=tuning.default.peak_reserved_bytes / MIB,
        recommended=chosen.settings,
        recommended_mib=chosen.peak_reserved_bytes / MIB,
        recovered=chosen.recovered_share or 0.0,
        expandable_recovered=tuning.given.recovered_share or 0.0,
        best_recovered=max(row.recovered_share or 0.0 for row in tuning.rows),
        unseen_recovered=None if unseen is None else _recovered(unseen, chosen.settings),
        unseen_expandable=None if unseen is None else _recovered(unseen, "expandable_segments:True"),
        static_mib=tuning.static.height_bytes / MIB,
        static_is_optimal=tuning.static.is_optimal,
        trials=tuning.num_trials,
        seconds=tuning.elapsed_seconds,
    )


def _recovered(recording: Recording, settings: str) -> float:
    """The share that given settings recover, without a search."""
    tuning: Tuning = tune(recording, alloc_conf=settings, seconds=0.0)
    row = tuning.given or tuning.default
    return row.recovered_share or 0.0


def main() -> None:
    """Prints the table and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", nargs="*", type=Path)
    parser.add_argument("--seconds", type=float, default=DEFAULT_SECONDS)
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    beside = sorted((Path(__file__).resolve().parents[2] / "shared/data/snapshots").glob("*.pickle"))
    lines = []
    print(
        f"{'workload':<34}{'live':>9}{'default':>9}{'tuned':>9}{'static':>9}{'recov.':>8}{'exp.':>7}{'best':>7}{'unseen':>8}  settings"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in WORKLOADS:
            first, second = (recording_of(name, seed, Path(folder)) for seed in (_SEED, _OTHER_SEED))
            lines.append(line(name, first, second, arguments.seconds))
            _print(lines[-1])
        synthetic = list(lines)
    for path in arguments.recordings or beside:
        lines.append(line(path.stem, read_recording(path), None, arguments.seconds))
        _print(lines[-1])
    _print_medians("synthetic", synthetic)
    _print_medians("all", lines)
    if arguments.csv is not None:
        with open(arguments.csv, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Line)], lineterminator="\n")
            writer.writeheader()
            writer.writerows({key: _rounded(value) for key, value in dataclasses.asdict(one).items()} for one in lines)


def _print(one: Line) -> None:
    unseen = "" if one.unseen_recovered is None else f"{one.unseen_recovered:.0%}"
    memory = "".join(f"{value:9,.0f}" for value in (one.live_mib, one.default_mib, one.recommended_mib, one.static_mib))
    shares = f"{one.recovered:8.0%}{one.expandable_recovered:7.0%}{one.best_recovered:7.0%}{unseen:>8}"
    print(f"{one.workload:<34}{memory}{shares}  {one.recommended or '(default)'}  {one.trials} trials", flush=True)


def _print_medians(name: str, lines: list[Line]) -> None:
    unseen = [one.unseen_recovered for one in lines if one.unseen_recovered is not None]
    print(
        f"{name}: median of {len(lines)} recovered {statistics.median(one.recovered for one in lines):.0%}"
        f" (expandable segments alone {statistics.median(one.expandable_recovered for one in lines):.0%},"
        f" the best that was tried {statistics.median(one.best_recovered for one in lines):.0%});"
        f" on recordings not seen {statistics.median(unseen):.0%}, worst {min(unseen):.0%}"
    )


def _rounded(value: object) -> object:
    return round(value, 3) if isinstance(value, float) else "" if value is None else value


if __name__ == "__main__":
    main()
