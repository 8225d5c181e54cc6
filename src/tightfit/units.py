"""Parsing and formatting of bytes and seconds.

Sizes are whole numbers of bytes. A unit with an `i` is a power of 1024 and one without is a power of 1000, as IEC 80000-13 has it;
a bare `G` or `M` is taken as binary, because that is what `free`, `nvidia-smi` and CUDA users mean by it. A number without any unit is GiB where it
can be one (nobody plans for 22 bytes), and is refused elsewhere.
"""

import codecs
import math
import re
import warnings
from typing import NewType

from tightfit.errors import UsageError

Bytes = NewType("Bytes", int)
Seconds = NewType("Seconds", float)

MINUS = "−"
SIGNS_IN_ASCII = "tightfit.signs"
"""Error handler for streams that are not UTF-8: signs are written as ASCII has them, anything else becomes `?`. `?406 us` would hide a minus."""
_ASCII = {MINUS: "-", "µ": "u", "…": "~", "×": "x", "→": "->"}

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_FACTORS = {"b": 1, "k": KIB, "m": MIB, "g": GIB, "t": 1 << 40}
# 1 GiB is 2**30 bytes, 1 GB 10**9: a budget copied from a data sheet must not come out 7 % too large.
_FACTORS |= {f"{prefix}ib": 1 << (10 * power) for power, prefix in enumerate("kmgt", 1)}
_FACTORS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)}
# 15 digits are exact in a float, and more than any memory has.
_PATTERN = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*|%)\s*")
_MIN_GIB, _MAX_GIB = 1, 1024
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "min": 60.0, "h": 3600.0, "d": 86400.0}
_HINT = "write a number with a unit, such as 22GiB, 1.5GB or 512M"


def parse(text: str, *, whole_bytes: int | None = None) -> Bytes:
    """The number of bytes that `text` names, such as `22GiB`, `1.5 GB`, `512M` or `80%` (of `whole_bytes`); `22` is 22 GiB, from 1 to 1024.

    Raises:
        UsageError: `text` is not a size, has no unit and is no number of GiB, or is a part of a whole that is not known.
    """
    number, unit = _parts(text)
    if unit == "%":
        return _share(text, number, whole_bytes)
    if unit or not number:
        return Bytes(round(number * _FACTORS[unit or "b"]))
    if not _MIN_GIB <= number <= _MAX_GIB:
        raise UsageError(f"'{text}' has no unit; {_HINT}")
    return Bytes(round(number * GIB))


def parse_bytes(text: str) -> Bytes:
    """As `parse`, but a number without a unit is bytes: for sizes that stand beside a file whose own sizes have no unit.

    Raises:
        UsageError: `text` is not a size.
    """
    number, unit = _parts(text)
    if unit == "%":
        return _share(text, number, None)
    return Bytes(round(number * _FACTORS[unit or "b"]))


def lacks_unit(text: str) -> bool:
    """Whether `text` is a size without a unit, which `parse` takes for GiB."""
    number, unit = _parts(text)
    return not unit and bool(number)


def to_bytes(size: str | int, name: str, *, whole_bytes: int | None = None) -> Bytes:
    """`size` in bytes: an int is bytes already, a str is read by `parse`. `name` is what the caller calls it, for messages.

    Raises:
        UsageError: it is not a size, or is negative.
    """
    if isinstance(size, int):
        if size < 0:
            raise UsageError(f"{name} is {size}: a size is not negative")
        return Bytes(size)
    if not isinstance(size, str):
        raise UsageError(f"{name} is {size!r}: give a text such as '22GiB', or whole bytes")
    try:
        count = parse(size, whole_bytes=whole_bytes)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None
    if lacks_unit(size):
        warnings.warn(f"{name} '{size}' has no unit; read as {size.strip()} GiB", stacklevel=3)
    return count


def _parts(text: str) -> tuple[float, str]:
    """The number and the unit of `text`, in lower case; empty if it has none."""
    match = _PATTERN.fullmatch(text)
    if match is None and re.fullmatch(r"\s*-\s*[0-9.].*", text):
        raise UsageError(f"'{text}' is negative; {_HINT}")
    unit = match[2].lower() if match else ""
    if match is None or (unit and unit != "%" and unit not in _FACTORS):
        raise UsageError(f"'{text}' is not a size; {_HINT}")
    return float(match[1]), unit


def _share(text: str, number: float, whole_bytes: int | None) -> Bytes:
    if whole_bytes is None:
        raise UsageError(f"'{text}' is a share of a size that is not known here; {_HINT}")
    if number > 100:
        raise UsageError(f"'{text}' is more than all of it; write at most 100%")
    return Bytes(int(number * whole_bytes / 100))


def parse_seconds(text: str) -> Seconds:
    """The seconds that `text` names, such as `500ms`, `1.5s`, `2min`, `7d` or `0.5`, which is seconds.

    Raises:
        UsageError: it is no time above 0.
    """
    match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Zµ]*)\s*", text)
    factor = _SECONDS.get(match[2].lower()) if match else None
    if match is None or factor is None or not float(match[1]):
        raise UsageError(f"'{text}' is no time; write a number with a unit, such as 500ms or 1.5s")
    return Seconds(float(match[1]) * factor)


# Two digits for GiB, as a tenth of a GiB is more than many plans save.
_UNITS_SHOWN = ((30, "GiB", 2), (20, "MiB", 1), (10, "KiB", 1))


def format_bytes(count: int) -> str:
    """`count` bytes in the largest binary unit that keeps a digit before the point: `1.50 GiB`, `−3.0 MiB`, `512 B`."""
    for power, unit, digits in _UNITS_SHOWN:
        if abs(count) >= 1 << power:
            return f"{count / (1 << power):.{digits}f} {unit}".replace("-", MINUS)
    return f"{count} B".replace("-", MINUS)


def format_bytes_up(count: int) -> str:
    """As `format_bytes`, rounded up, for memory that is to be given: so much of it is enough."""
    for power, unit, digits in _UNITS_SHOWN:
        if count >= 1 << power:
            return f"{-(-count * 10**digits // (1 << power)) / 10**digits:.{digits}f} {unit}"
    return format_bytes(count)


def format_seconds(seconds: float) -> str:
    """`seconds` in the unit that keeps three digits readable: `1.25 s`, `31.0 ms`, `8.2 µs`."""
    for factor, unit, digits in ((1.0, "s", 2), (1e-3, "ms", 1)):
        if abs(seconds) >= factor:
            return f"{seconds / factor:.{digits}f} {unit}"
    return f"{seconds * 1e6:.1f} µs"


def format_range_of_seconds(seconds: float, low: float, high: float) -> str:
    """The ends of the range of `seconds`, in the unit that `format_seconds` has for these, three of them where the ends are close: `390-440`."""
    factor = 1.0 if abs(seconds) >= 1.0 else 1e-3 if abs(seconds) >= 1e-3 else 1e-6
    digits = (
        max(0, 2 - math.floor(math.log10(high / factor))) if high / factor < 100 and high - low < 10 * factor else 0
    )
    return f"{low / factor:.{digits}f}-{high / factor:.{digits}f}"


def format_bytes_change(count: int) -> str:
    """`count` bytes more or less, with the sign in front: `+19.5 KiB`, `−4.53 GiB`; empty for no change."""
    return f"{'+' if count > 0 else MINUS}{format_bytes(abs(count))}" if count else ""


def format_seconds_change(seconds: float) -> str:
    """`seconds` more or less, with the sign in front: `+1.2 ms`, `−406.0 µs`; empty for no change."""
    return f"{'+' if seconds > 0 else MINUS}{format_seconds(abs(seconds))}" if seconds else ""


def _in_ascii(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_ASCII.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


codecs.register_error(SIGNS_IN_ASCII, _in_ascii)
