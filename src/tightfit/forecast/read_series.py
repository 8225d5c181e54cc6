"""Reads series from a CSV file whose columns are found by their headers: a time, a size, and whose it is.

Files of many tools are read as they come: `timestamp,value,container_ip`, `time,bytes,name`, what `nvidia-smi --query-gpu=... --format=csv` prints.
The rows may be in any order, the times irregular, and samples missing.
"""

import csv
import dataclasses
import datetime
import gzip
import io
import itertools
import math
import re
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tightfit.errors import UsageError
from tightfit.errors.missing_files import no_file
from tightfit.forecast.series import Floats, Series
from tightfit.units import parse_bytes

# The best word comes first: of `pod` and `node`, the pod names the series.
_TIME = ("time", "timestamp", "datetime", "ts", "date")
_BYTES = ("bytes", "memory", "mem", "used", "usage", "value", "vram")
_NAME = (
    "name",
    "series",
    "pod",
    "container",
    "process",
    "pid",
    "job",
    "task",
    "workload",
    "gpu",
    "uuid",
    "index",
    "device",
    "instance",
    "host",
    "node",
    "id",
    "ip",
)
# `memory.total` and `utilization.memory` are sizes or shares of something else.
_NOT_USED = {
    "total",
    "free",
    "available",
    "limit",
    "capacity",
    "utilization",
    "util",
    "percent",
    "pct",
    "ratio",
    "requested",
}
_UNITS = {"kib", "mib", "gib", "tib", "kb", "mb", "gb", "tb"}
_MISSING = {"", "nan", "na", "n/a", "[n/a]", "null", "none", "-", "[not supported]", "[unknown error]"}
_NAMELESS = "(no name)"
# Times of today in seconds have 10 digits; with 13, 16 or 19 they are milli-, micro- or nanoseconds.
_TICKS = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SeriesFile:
    """What a file holds: its series in the order in which their names appear, and what had to be decided about its rows, one line each."""

    series: tuple[Series, ...]
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """Which column is what; `labels` with the best first."""

    time: int
    size: int
    unit: int
    labels: tuple[int, ...]


def read_series(path: str) -> SeriesFile:
    """The series of a CSV file, gzipped or not; `-` is standard input.

    Raises:
        UsageError: it cannot be read, a column is missing or ambiguous, or a cell is wrong; the message has the line number.
    """
    label = "standard input" if path == "-" else path
    text = _text(path, label)
    header, lines, rows, notes = _rows(label, text)
    columns = _find_columns(label, header)
    times = _times(label, lines, [row[columns.time] for row in rows])
    sizes = _sizes(label, lines, [row[columns.size] for row in rows], columns.unit)
    is_there = ~np.isnan(sizes)
    if not is_there.any():
        raise UsageError(f"{label} has no sample with a size in the column '{header[columns.size]}'")
    if not is_there.all():
        notes.append(
            f"{label}: {len(sizes) - int(is_there.sum())} of {len(sizes)} samples have no size; they are skipped"
        )
    kept = np.flatnonzero(is_there)
    times, sizes, rows = times[kept], sizes[kept], [rows[i] for i in kept]
    default = Path(path).name.partition(".")[0] if path != "-" else "stdin"
    numbers, names = _series_numbers(times, rows, columns, default)
    # By series, then time, then size: of several samples of one time the last one is the largest.
    order = np.lexsort((sizes, times, numbers))
    numbers, times, sizes = numbers[order], times[order], sizes[order]
    is_last = np.append((np.diff(numbers) != 0) | (np.diff(times) != 0), True)
    if not is_last.all():
        notes.append(
            f"{label}: {len(times) - int(is_last.sum())} samples have the time of another one of their series; the largest counts"
        )
    numbers, times, sizes = numbers[is_last], times[is_last], sizes[is_last]
    starts = np.searchsorted(numbers, np.arange(len(names) + 1))
    parts = [slice(begin, end) for begin, end in itertools.pairwise(starts)]
    series = tuple(
        Series(name=name, times=times[part], values=sizes[part]) for name, part in zip(names, parts, strict=True)
    )
    return SeriesFile(series=series, notes=tuple(notes))


def _text(path: str, label: str) -> str:
    try:
        content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except FileNotFoundError:
        raise UsageError(no_file(label)) from None
    except OSError as error:
        raise UsageError(f"cannot read {label}: {error.strerror}") from None
    try:
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
        # With the mark that spreadsheets put in front.
        return content.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error):
        raise UsageError(f"{label} is not a whole gzip file") from None
    except UnicodeDecodeError:
        raise UsageError(f"{label} is not a text file; a CSV file with the columns time,bytes,name is needed") from None


def _rows(label: str, text: str) -> tuple[list[str], list[int], list[list[str]], list[str]]:
    """The header, and for each row that is not blank its line number and its cells; with the notes."""
    first = text.lstrip().partition("\n")[0]
    delimiter = max(",;\t", key=first.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True)
    lines: list[int] = []
    rows: list[list[str]] = []
    try:
        for row in reader:
            if row:
                rows.append(row)
                lines.append(reader.line_num)
    except csv.Error as error:
        raise UsageError(f"{label}, line {reader.line_num}: {error}") from None
    if not rows:
        raise UsageError(f"{label} is empty; a CSV file with the columns time,bytes,name is needed")
    header, rows, lines = [cell.strip() for cell in rows[0]], rows[1:], lines[1:]
    notes = []
    # A monitor may be writing its last line just now.
    if rows and len(rows[-1]) < len(header) and not text.endswith("\n"):
        notes.append(f"{label}: the last line is incomplete and is skipped")
        rows, lines = rows[:-1], lines[:-1]
    for line, row in zip(lines, rows, strict=True):
        if len(row) != len(header):
            raise UsageError(f"{label}, line {line}: {len(row)} fields, and the first line has {len(header)}")
    if not rows:
        raise UsageError(f"{label} has no samples, only the line '{first.strip()}'")
    return header, lines, rows, notes


def _find_columns(label: str, header: Sequence[str]) -> _Columns:
    words = [_words(cell) for cell in header]
    every = range(len(header))
    time = _best(label, header, words, _TIME, "time (such as time or timestamp)", every)
    rest = [i for i in every if i != time and not words[i] & _NOT_USED]
    size = _best(label, header, words, _BYTES, "bytes (such as bytes, memory or value)", rest)
    unit = next(iter(words[size] & _UNITS), "b")
    others = [i for i in every if i not in (time, size) and words[i] & {*_NAME} and not words[i] & {*_TIME, *_NOT_USED}]
    labels = sorted(others, key=lambda i: _rank(words[i], _NAME))
    return _Columns(time=time, size=size, unit=parse_bytes(f"1 {unit}"), labels=tuple(labels))


def _words(header: str) -> set[str]:
    """The words of a column's name in lower case: of `podName`, `pod` and `name`; of `memory.used [MiB]`, `memory`, `used` and `mib`."""
    parts = re.findall(r"[A-Za-z]+", header)
    return {word.lower() for part in parts for word in (part, *re.findall(r"[A-Z]?[a-z]+|[A-Z]+", part))}


def _rank(words: set[str], vocabulary: Sequence[str]) -> tuple[int, int]:
    """How well the words of a header fit: the best of them in the vocabulary, then how few others there are."""
    return min(i for i, word in enumerate(vocabulary) if word in words), len(words)


def _best(
    label: str,
    header: Sequence[str],
    words: Sequence[set[str]],
    vocabulary: Sequence[str],
    what: str,
    among: Sequence[int],
) -> int:
    found = sorted((_rank(words[i], vocabulary), i) for i in among if words[i] & {*vocabulary})
    if not found:
        raise UsageError(f"{label} has no column of {what}; its columns are {', '.join(map(repr, header))}")
    if len(found) > 1 and found[0][0] == found[1][0]:
        first, second = (header[i] for _, i in found[:2])
        raise UsageError(f"{label} has two columns of {what}, '{first}' and '{second}'; rename or remove one")
    return found[0][1]


def _times(label: str, lines: Sequence[int], cells: Sequence[str]) -> Floats:
    """Seconds; numbers may be in milli-, micro- or nanoseconds, texts are dates (ISO 8601, or with slashes)."""
    try:
        times = np.array(cells, dtype=np.float64)
    except ValueError:
        times = np.array([_moment(label, line, cell) for line, cell in zip(lines, cells, strict=True)])
    if not np.isfinite(times).all():
        at = int(np.flatnonzero(~np.isfinite(times))[0])
        raise UsageError(f"{label}, line {lines[at]}: '{cells[at]}' is not a time")
    typical = float(np.median(np.abs(times)))
    return times / next((factor for least, factor in _TICKS if typical >= least), 1.0)


def _moment(label: str, line: int, cell: str) -> float:
    text = cell.strip()
    try:
        return float(text)
    except ValueError:
        pass
    try:
        moment = datetime.datetime.fromisoformat(text.replace("/", "-"))
    except ValueError:
        raise UsageError(
            f"{label}, line {line}: '{cell}' is not a time; write seconds or a date such as 2026-11-23T06:00:00Z"
        ) from None
    # A fixed zone for dates without one: local time would jump where summer time begins.
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()


def _sizes(label: str, lines: Sequence[int], cells: Sequence[str], unit: int) -> Floats:
    """Bytes, NaN where a cell has none."""
    try:
        sizes = np.array(cells, dtype=np.float64) * unit
    except ValueError:
        sizes = np.array([_size(label, line, cell, unit) for line, cell in zip(lines, cells, strict=True)])
    wrong = np.flatnonzero((sizes < 0) | (sizes >= 1 << 60))
    if len(wrong):
        at = int(wrong[0])
        why = "is negative" if sizes[at] < 0 else "is more than any memory has"
        raise UsageError(f"{label}, line {lines[at]}: the size {cells[at].strip()} {why}")
    return sizes


def _size(label: str, line: int, cell: str, unit: int) -> float:
    text = cell.strip()
    if text.lower() in _MISSING:
        return math.nan
    try:
        return float(text) * unit
    except ValueError:
        pass
    try:
        return float(parse_bytes(text))
    except UsageError:
        raise UsageError(f"{label}, line {line}: '{cell}' is not a size in bytes") from None


def _series_numbers(
    times: Floats, rows: Sequence[Sequence[str]], columns: _Columns, default: str
) -> tuple[np.ndarray, list[str]]:
    """The number of each row's series, and the names. A second column of labels counts where it tells samples of one name and time apart."""
    names, num_apart = [default] * len(rows), 0
    for count, column in enumerate(columns.labels):
        cells = [row[column].strip() or _NAMELESS for row in rows]
        longer = cells if count == 0 else [f"{name}/{cell}" for name, cell in zip(names, cells, strict=True)]
        num_longer = len({*zip(longer, times.tolist(), strict=True)})
        if count == 0 or num_longer > num_apart:
            names, num_apart = longer, num_longer
        if num_apart == len(rows):
            break
    found: dict[str, int] = {}
    numbers = np.array([found.setdefault(name, len(found)) for name in names])
    return numbers, list(found)
