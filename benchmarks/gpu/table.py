"""Results as a table, and their summary: errors of each peak and of the time, failures within the estimate, waste; in total and by family. No torch."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.accuracy_table import percentile

Result = Mapping[str, Any]
FIGURES = ("allocated", "reserved", "process", "seconds")
_MEASURED = {
    "allocated": "allocated_bytes",
    "reserved": "reserved_bytes",
    "process": "process_bytes",
    "seconds": "seconds_per_step",
}
_ESTIMATED = {**_MEASURED, "process": "device_bytes"}
_ROW_COLUMNS = ("family", "batch_size", "precision", "optimizer", "recompute", "attention", "expandable_segments")
COLUMNS = (
    *("name", *_ROW_COLUMNS),
    *(f"{kind}_{figure}" for figure in FIGURES for kind in ("measured", "estimated", "error")),
    *("reserved_low", "reserved_high", "out_of_memory", "retries"),
    *("fails_at_estimate", "fails_at_upper_end", "estimate_seconds", "fault"),
)


def error_of(result: Result, figure: str) -> float | None:
    """(estimate - measurement) / measurement, None where either is missing; a run that ran out of memory measured no need."""
    measured, estimated = result.get("measured") or {}, result.get("estimate") or {}
    if measured.get("failed") or not measured.get(_MEASURED[figure]) or _ESTIMATED[figure] not in estimated:
        return None
    return estimated[_ESTIMATED[figure]] / measured[_MEASURED[figure]] - 1


def to_csv(results: Sequence[Result], remarks: Mapping[str, Any]) -> str:
    """The table, below its remarks (card, versions, command, date) as `# name: text` lines."""
    out = io.StringIO()
    for name, text in remarks.items():
        out.write(f"# {name}: {text}\n")
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n", restval="")
    writer.writeheader()
    for result in results:
        writer.writerow({key: value for key, value in _cells(result).items() if value is not None})
    return out.getvalue()


def _cells(result: Result) -> dict[str, Any]:
    measured, estimated = result.get("measured") or {}, result.get("estimate") or {}
    limited = result.get("limited") or {}
    cells: dict[str, Any] = {"name": result["name"], **{key: result["row"][key] for key in _ROW_COLUMNS}}
    for figure in FIGURES:
        error = error_of(result, figure)
        cells[f"measured_{figure}"] = measured.get(_MEASURED[figure])
        cells[f"estimated_{figure}"] = estimated.get(_ESTIMATED[figure])
        cells[f"error_{figure}"] = None if error is None else f"{error:.5f}"
    return cells | {
        "reserved_low": estimated.get("reserved_low_bytes"),
        "reserved_high": estimated.get("reserved_high_bytes"),
        "out_of_memory": _flag(measured.get("failed")),
        "retries": measured.get("num_retries"),
        "fails_at_estimate": _flag(limited.get("at_estimate")),
        "fails_at_upper_end": _flag(limited.get("at_upper_end")),
        "estimate_seconds": estimated.get("elapsed_seconds"),
        "fault": measured.get("fault") or estimated.get("fault") or "",
    }


def _flag(value: bool | None) -> int | None:
    return None if value is None else int(value)


def summary(results: Sequence[Result]) -> str:
    """Lines for all rows and for each family."""
    families = list(dict.fromkeys(result["row"]["family"] for result in results))
    parts = [("all", list(results))]
    parts += [(name, [result for result in results if result["row"]["family"] == name]) for name in families]
    lines = [
        f"{'':16} {'rows':>5} {'peak':>10} {'median':>8} {'90th':>8} {'95th':>8} {'under':>7} {'over by':>8}"
        f" {'in band':>8} {'fails':>7} {'at upper':>8}"
    ]
    for name, own in parts:
        for figure in FIGURES:
            lines.append(_line(name if figure == FIGURES[0] else "", figure, own))
    faults = [result for result in results if _cells(result)["fault"]]
    lines += [f"not compared: {result['name']}: {_cells(result)['fault']}" for result in faults]
    return "\n".join(lines)


def _line(name: str, figure: str, results: Sequence[Result]) -> str:
    errors = [error for result in results if (error := error_of(result, figure)) is not None]
    sizes = list(map(abs, errors))
    cells = [_percent(percentile(sizes, share)) for share in (0.5, 0.9, 0.95)]
    cells += [_percent(_share([error < 0 for error in errors]), 0)]
    # How much more than needed a reservation of the estimate would take, of the runs that it is enough for.
    cells += [_percent(percentile([error for error in errors if error >= 0], 0.5))]
    inside, failed, failed_above = [], [], []
    for result in results:
        limited, estimated = result.get("limited") or {}, result.get("estimate") or {}
        measured = (result.get("measured") or {}).get("reserved_bytes")
        if measured and "reserved_low_bytes" in estimated:
            inside.append(estimated["reserved_low_bytes"] <= measured <= estimated["reserved_high_bytes"])
        if limited.get("at_estimate") is not None:
            failed.append(limited["at_estimate"])
            failed_above.append(bool(limited["at_estimate"] and limited.get("at_upper_end")))
    of_reserved = [_percent(_share(flags), 0) for flags in (inside, failed, failed_above)]
    cells += of_reserved if figure == "reserved" else [""] * 3
    widths = (8, 8, 8, 7, 8, 8, 7, 8)
    return f"{name:16} {len(errors):>5} {figure:>10} " + " ".join(
        f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)
    )


def _share(flags: Iterable[bool]) -> float:
    counted = list(flags)
    return sum(counted) / len(counted) if counted else math.nan


def _percent(value: float, digits: int = 2) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.{digits}f} %"
