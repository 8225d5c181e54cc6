"""`tightfit forecast`: the maximum of each series of a CSV file over its next samples, as a median and an upper bound."""

import dataclasses
import json as json_module
import sys
from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tightfit.cli.arguments.sizes import Size, with_unit
from tightfit.errors import UsageError
from tightfit.forecast.admission import Admission, admit
from tightfit.forecast.forecasts import SeriesForecast, forecast_series
from tightfit.forecast.horizon import parse_horizon
from tightfit.forecast.read_series import read_series
from tightfit.units import format_bytes, parse

# rich takes 80 columns where stdout is no terminal, and would cut the table's columns.
_PIPED_WIDTH = 160


# Otherwise `-` would be an option that nobody knows.
_File = Annotated[str, Parameter(allow_leading_hyphen=True)]


def forecast(
    file: _File,
    /,
    *,
    horizon: str = "10",
    quantile: float = 0.975,
    job: Size | None = None,
    capacity: Size | None = None,
    json: bool = False,
) -> int:
    """Forecast the maximum of each series in FILE over its next samples: the median, and an upper bound.

    With --job and --capacity, the exit code is 1 if the job does not fit.

    Args:
        file: CSV, gzipped or not, with columns for a time, bytes and a name, found by their headers; - is standard input.
        horizon: how far: a number of samples (default 10), or a time such as 10min or 1h.
        quantile: the share of forecasts that the maximum is to stay within (default 0.975).
        job: with --capacity: whether a job that needs this much fits a card beside all series of the file.
        capacity: memory of that card, such as 80GiB.
        json: print one JSON object instead of a table.
    """
    if not 0.5 <= quantile < 1:
        raise UsageError(f"--quantile {quantile:g}: write a share from 0.5 up to, but not including, 1, such as 0.975")
    ahead = parse_horizon(horizon)
    if (job is None) != (capacity is None):
        raise UsageError("--job and --capacity go together: a job of what size, on a card of what size?")
    content = read_series(file)
    for note in content.notes:
        sys.stderr.write(f"tightfit: {note}\n")
    found = [forecast_series(each, horizon=ahead.num_samples(each), quantile=quantile) for each in content.series]
    admission = None
    if job is not None and capacity is not None:
        sizes = {
            "job_bytes": parse(with_unit("--job", job)),
            "capacity_bytes": parse(with_unit("--capacity", capacity)),
        }
        admission = admit(content.series, horizon=ahead, quantile=quantile, **sizes)
    if json:
        answer: dict[str, Any] = {"schema": 1, "series": [_as_json(each) for each in found]}
        if admission is not None:
            answer["admission"] = {**dataclasses.asdict(admission), "fits": admission.fits}
        sys.stdout.write(json_module.dumps(answer) + "\n")
    else:
        console = Console() if sys.stdout.isatty() else Console(width=_PIPED_WIDTH)
        console.print(_table(found, quantile))
        for note in dict.fromkeys(each.note for each in found if each.note):
            names = [each.name for each in found if each.note == note]
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            console.print(Text(f"{names[0]}{more}: {note}"))
        if admission is not None:
            console.print(_sentence(admission, quantile), highlight=False)
    return 0 if admission is None or admission.fits else 1


def _sentence(admission: Admission, quantile: float) -> str:
    job, capacity, now, upper = (
        format_bytes(size)
        for size in (admission.job_bytes, admission.capacity_bytes, admission.now_bytes, admission.upper_bytes)
    )
    facts = (
        f"all series use {now} of {capacity} now, and stay within {upper} with a probability of {100 * quantile:g} %"
    )
    if not admission.fits_now:
        return f"a job of {job} does not fit now: {facts}"
    if admission.probability is None:
        return f"a job of {job} fits now, but its probability of fitting over the horizon is below 50 %: {facts}"
    probability = f"{100 * admission.probability:g} %"
    if not admission.fits:
        return f"a job of {job} fits now, but its probability of fitting over the horizon is {probability}, below the requested {100 * quantile:g} %: {facts}"
    return f"a job of {job} fits now, and over the horizon with a probability of {probability}: {facts}"


def _as_json(found: SeriesForecast) -> dict[str, Any]:
    return {
        "name": found.name,
        "model": found.model,
        "median_bytes": found.median_bytes,
        "upper_bytes": found.upper_bytes,
        "now_bytes": found.now_bytes,
        "samples": found.num_samples,
        "horizon": found.horizon,
        "season_samples": found.season_samples,
        "note": found.note,
    }


def _table(found: Sequence[SeriesForecast], quantile: float) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("series", overflow="fold")
    for heading in ("now", "median", f"{100 * quantile:g} %"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("model", "season"):
        table.add_column(heading, no_wrap=True)
    for each in found:
        sizes = (format_bytes(size) for size in (each.now_bytes, each.median_bytes, each.upper_bytes))
        season = f"every {each.season_samples} samples" if each.season_samples else "none"
        words = (each.model.replace("_", " "), season)
        # A name is text from a file, and no markup.
        table.add_row(Text(each.name), *sizes, *words)
    return table
