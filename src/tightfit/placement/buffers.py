"""The placement problem: buffers with a lifetime and a size, in an arena of limited height.

A buffer is live in the half-open interval [lower, upper) of any integer clock. Two buffers whose lifetimes overlap must not share addresses; that is
the only constraint, and it makes the problem (dynamic storage allocation, SR2 of Garey and Johnson, 1979) NP-complete. Problems are CSV files with
the columns `id,lower,upper,size` (the format of MiniMalloc), and a solution is the same file with the column `offset`.
"""

import csv
import dataclasses
import heapq
import io
import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path

from tightfit.errors import UsageError
from tightfit.errors.missing_files import no_file
from tightfit.output_files import write_text

_COLUMNS = ("id", "lower", "upper", "size")
# A solution can be read as a problem again.
_ALLOWED = {*_COLUMNS, "offset"}
_MAX_BYTES = 1 << 48
"""The largest size of one buffer, so that sums over thousands of them fit 64 bits."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """`size` bytes that are live from time `lower` until just before `upper`."""

    name: str
    lower: int
    upper: int
    size: int

    def __post_init__(self) -> None:
        """Refuses an empty lifetime, and a size that is negative or above 256 TiB.

        Raises:
            UsageError: with the name of the buffer.
        """
        if self.lower >= self.upper:
            raise UsageError(f"buffer {self.name} ends at {self.upper}, not after its begin at {self.lower}")
        if self.size < 0:
            raise UsageError(f"buffer {self.name} has the negative size {self.size}")
        if self.size > _MAX_BYTES:
            raise UsageError(f"buffer {self.name} has {self.size} bytes; more than {_MAX_BYTES} cannot be placed")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlacementProblem:
    """Buffers to be placed below `capacity` bytes, each at a multiple of `alignment`; no capacity means as low as possible."""

    buffers: tuple[Buffer, ...]
    capacity: int | None = None
    alignment: int = 1

    def __post_init__(self) -> None:
        """Refuses duplicate names, and an alignment or a capacity that makes no sense.

        Raises:
            UsageError: with the reason.
        """
        if self.alignment < 1:
            raise UsageError(f"the alignment {self.alignment} is not a positive number of bytes")
        if self.capacity is not None and self.capacity < 0:
            raise UsageError(f"the capacity {self.capacity} is negative")
        seen: set[str] = set()
        for buffer in self.buffers:
            if buffer.name in seen:
                raise UsageError(f"two buffers have the id {buffer.name}; each needs its own")
            seen.add(buffer.name)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """The time of the most live bytes, those bytes (each buffer rounded up to the alignment, except the topmost), and the names of the buffers."""

    moment: int
    num_bytes: int
    names: tuple[str, ...]


def worst_crowd(problem: PlacementProblem) -> Crowd:
    """The lower bound of the height of any placement.

    Buffers stacked at multiples of the alignment each take their size rounded up, except the one on top; leaving out the largest such
    rounding keeps the bound valid whichever that is.
    """
    # Live bytes grow only where a lifetime begins, so a maximum is at such a time.
    by_begin = sorted((buffer for buffer in problem.buffers if buffer.size), key=lambda buffer: buffer.lower)
    ends: list[tuple[int, int]] = []
    paddings: list[tuple[int, int]] = []
    live_bytes = worst_bytes = worst_moment = 0
    for moment, beginning in itertools.groupby(by_begin, key=lambda buffer: buffer.lower):
        for buffer in beginning:
            padding = -buffer.size % problem.alignment
            live_bytes += buffer.size + padding
            heapq.heappush(ends, (buffer.upper, buffer.size + padding))
            heapq.heappush(paddings, (-padding, buffer.upper))
        while ends[0][0] <= moment:
            live_bytes -= heapq.heappop(ends)[1]
        # The largest on top; those that are not live any more go when they are.
        while paddings[0][1] <= moment:
            heapq.heappop(paddings)
        total = live_bytes + paddings[0][0]
        if total > worst_bytes:
            worst_bytes, worst_moment = total, moment
    names = (b.name for b in problem.buffers if b.lower <= worst_moment < b.upper and b.size)
    return Crowd(moment=worst_moment, num_bytes=worst_bytes, names=tuple(names) if worst_bytes else ())


def read_problem(path: Path | str, *, capacity: int | None = None, alignment: int = 1) -> PlacementProblem:
    """The problem in a CSV file with the columns `id,lower,upper,size` in any order; a column `offset` is ignored.

    Raises:
        UsageError: the file cannot be read, or a row is wrong; the message has the row's line number.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            _check_columns(path, reader.fieldnames or ())
            buffers = tuple(_buffer(path, reader.line_num, row) for row in reader)
    except FileNotFoundError:
        raise UsageError(no_file(str(path))) from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(
            f"{path} is not a text file; a CSV file with the columns id,lower,upper,size is needed"
        ) from None
    return PlacementProblem(buffers=buffers, capacity=capacity, alignment=alignment)


def write_solution(path: Path | str, problem: PlacementProblem, offsets: Mapping[str, int]) -> None:
    """Writes the buffers in their order with the column `offset`, in bytes from the start of the arena.

    Raises:
        OutputError: the file cannot be written.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*_COLUMNS, "offset"))
    for buffer in problem.buffers:
        writer.writerow((buffer.name, buffer.lower, buffer.upper, buffer.size, offsets[buffer.name]))
    write_text(path, text.getvalue())


def _check_columns(path: Path | str, columns: Iterable[str]) -> None:
    columns = list(columns)
    missing = [column for column in _COLUMNS if column not in columns]
    if missing:
        raise UsageError(f"{path} has no column {missing[0]}; its first line must be id,lower,upper,size")
    unknown = [column for column in columns if column not in _ALLOWED]
    if unknown:
        raise UsageError(
            f"{path} has the unknown column '{unknown[0]}'; only id,lower,upper,size (and offset) are understood"
        )


def _buffer(path: Path | str, line: int, row: dict[str, str | None]) -> Buffer:
    place = f"{path}, line {line}"
    # csv.DictReader puts surplus fields under the key None, and None into missing ones.
    if None in row or None in row.values():
        raise UsageError(f"{place}: the row has not as many fields as the first line")
    name = str(row["id"])
    numbers: dict[str, int] = {}
    for column in _COLUMNS[1:]:
        try:
            numbers[column] = int(str(row[column]))
        except ValueError:
            raise UsageError(f"{place}: the {column} '{row[column]}' is not a whole number") from None
    try:
        return Buffer(name=name, lower=numbers["lower"], upper=numbers["upper"], size=numbers["size"])
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from None
