"""How good the forecasts of memory are: misses and reserved memory on the traces of real pods, beside each single model.

python -m benchmarks.forecast [--every 12] [--csv docs/forecast.csv] [--data FILE]      the file is that beside the checkout, if not given

Rolling origin: the first third of each pod's samples is warm-up, then each forecast is made anew from the samples up to it, as one call of `tightfit forecast` does.
Pods are split in two by their names: constants were chosen on the one half, and the other is scored. A miss is a maximum above the bound; over-reservation is the bound less
the maximum, misses with it as they are (negative). Single models are as they stand: neither chosen nor corrected. STL is given the likeliest period of each pod.
"""

import argparse
import csv
import dataclasses
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from tightfit.forecast.forecasts import MODELS, contest
from tightfit.forecast.models.seasonal import Seasonal, is_installed
from tightfit.forecast.read_series import read_series
from tightfit.forecast.season import likeliest_period
from tightfit.forecast.series import Floats, Series, future_maximum
from tightfit.forecast.tournament import pinball_loss
from tightfit.units import GIB

SETTINGS = ((10, 0.975), (60, 0.9))
"""Horizon in samples, and quantile."""
TARGETS = {10: (0.025, 4.4), 60: (0.10, 4.5)}
"""The largest share of misses, and the largest mean over-reservation in GiB."""
_TOURNAMENT, _UNCORRECTED = "tournament, corrected", "tournament"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row of the table, over all forecasts of a group of pods; memory in GiB."""

    pods: str
    horizon: int
    quantile: float
    model: str
    num_pods: int
    num_forecasts: int
    misses_percent: float
    over_gib: float
    pinball_gib: float
    worst_pod_percent: float
    median_covers_percent: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A model's bounds on one pod, and what came: (forecasts,) each, in bytes."""

    bounds: Floats
    outcomes: Floats


def split(series: Iterable[Series]) -> dict[str, list[Series]]:
    """Every other pod in the order of the names, so that both halves have pods of all kinds."""
    ordered = sorted(series, key=lambda each: each.name)
    return {"tuned on": ordered[::2], "scored": ordered[1::2]}


def score_pod(series: Series, horizon: int, quantile: float, every: int) -> tuple[dict[str, Scored], list[str], Floats]:
    """All models on one pod, who led at each forecast, and the medians; nothing for a pod with no window after its warm-up."""
    outcomes = future_maximum(series.values, horizon)
    origins = range(len(series.values) // 3, len(outcomes), every)
    rows: dict[str, list[float]] = {}
    leaders, medians = [], []
    period = likeliest_period(series.values, longer_than=horizon) if is_installed() else None
    single = (*MODELS, Seasonal(period)) if period else MODELS
    for origin in origins:
        past = Series(name=series.name, times=series.times[: origin + 1], values=series.values[: origin + 1])
        found = contest(past, horizon=horizon, quantile=quantile)
        lead = found.lead
        leaders.append(found.models[lead].name)
        medians.append(float(found.bounds[lead][-1, 0]))
        rows.setdefault(_TOURNAMENT, []).append(found.upper(lead))
        rows.setdefault(_UNCORRECTED, []).append(float(found.bounds[lead][-1, -1]))
        for model, bounds in zip(found.models, found.bounds, strict=True):
            rows.setdefault(model.name, []).append(float(bounds[-1, -1]))
        for model in single[len(MODELS) :]:
            rows.setdefault("seasonal (STL)", []).append(
                float(model.bounds(found.history, np.array([quantile]))[-1, 0])
            )
    came = outcomes[list(origins)]
    return {name: Scored(bounds=np.array(row), outcomes=came) for name, row in rows.items()}, leaders, np.array(medians)


def lines(group: str, pods: Sequence[Series], horizon: int, quantile: float, every: int) -> list[Line]:
    """The rows of one group of pods, the tournament first."""
    by_model: dict[str, list[Scored]] = {}
    covered = []
    leaders: list[str] = []
    for series in pods:
        scored, led, medians = score_pod(series, horizon, quantile, every)
        leaders += led
        for name, each in scored.items():
            by_model.setdefault(name, []).append(each)
        if scored:
            covered.append(scored[_TOURNAMENT].outcomes <= medians)
    counts = {name: leaders.count(name) for name in dict.fromkeys(leaders)}
    print(f"  leaders: {', '.join(f'{name} {count}' for name, count in counts.items())}")
    return [_line(group, horizon, quantile, name, each, covered) for name, each in by_model.items()]


def _line(group: str, horizon: int, quantile: float, model: str, pods: list[Scored], covered: list[np.ndarray]) -> Line:
    bounds, outcomes = (np.concatenate([getattr(pod, name) for pod in pods]) for name in ("bounds", "outcomes"))
    return Line(
        pods=group,
        horizon=horizon,
        quantile=quantile,
        model=model,
        num_pods=len(pods),
        num_forecasts=len(bounds),
        misses_percent=100 * float((outcomes > bounds).mean()),
        over_gib=float((bounds - outcomes).mean()) / GIB,
        pinball_gib=float(pinball_loss(bounds, outcomes, quantile).mean()) / GIB,
        worst_pod_percent=100 * max(float((pod.outcomes > pod.bounds).mean()) for pod in pods),
        median_covers_percent=100 * float(np.concatenate(covered).mean()) if model == _TOURNAMENT else None,
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    beside = Path(__file__).resolve().parents[2] / "shared/data/memory_traces/gpu_memory_per_pod.csv.gz"
    parser.add_argument("--data", type=Path, default=beside)
    parser.add_argument("--every", type=int, default=12, help="samples between two forecasts of a pod")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    if not arguments.data.is_file():
        raise SystemExit(f"there are no traces at {arguments.data}; name a file with --data")
    groups = split(read_series(str(arguments.data)).series)
    table = []
    for horizon, quantile in SETTINGS:
        for group, pods in groups.items():
            begin = time.process_time()
            print(f"\nthe next {horizon} samples, {100 * quantile:g} %, pods {group}", flush=True)
            found = lines(group, pods, horizon, quantile, arguments.every)
            table += found
            _print(found, TARGETS[horizon])
            print(f"  {len(pods)} pods, {time.process_time() - begin:.0f} s of processor time", flush=True)
    if arguments.csv is not None:
        with open(arguments.csv, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Line)], lineterminator="\n")
            writer.writeheader()
            writer.writerows({key: _rounded(value) for key, value in dataclasses.asdict(one).items()} for one in table)


def _print(table: list[Line], target: tuple[float, float]) -> None:
    misses, over = target
    print(
        f"  {'model':<24}{'misses':>8}{'over-reservation':>18}{'pinball loss':>14}{'worst pod':>11}   target {100 * misses:g} %, {over} GiB"
    )
    for one in table:
        sizes = f"{one.over_gib:14.2f} GiB{one.pinball_gib:10.3f} GiB"
        print(f"  {one.model:<24}{one.misses_percent:7.2f}%{sizes}{one.worst_pod_percent:10.1f}%")
        if one.median_covers_percent is not None:
            print(f"  {'':<24}its median holds in {one.median_covers_percent:.1f} %")


def _rounded(value: object) -> object:
    return round(value, 3) if isinstance(value, float) else "" if value is None else value


if __name__ == "__main__":
    main()
