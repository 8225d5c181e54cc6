"""Parsing and formatting of bytes and seconds.

Sizes are whole numbers of bytes. A unit with an `i` is a power of 1024 and one without is a power of 1000, as IEC 80000-13 has it;
a bare `G` or `M` is taken as binary, because that is what `free`, `nvidia-smi` and CUDA users mean by it.
"""

import codecs
import re
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

_FACTORS = {"": 1, "b": 1, "k": KIB, "m": MIB, "g": GIB, "t": 1 << 40}
# 1 GiB is 2**30 bytes, 1 GB 10**9: a budget copied from a data sheet must not come out 7 % too large.
_FACTORS |= {f"{prefix}ib": 1 << (10 * power) for power, prefix in enumerate("kmgt", 1)}
_FACTORS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)}
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([a-zA-Z]*)\s*")


def parse(text: str) -> Bytes:
    """The number of bytes that `text` names, such as `22GiB`, `1.5 GB`, `512M` or `4096`.

    Raises:
        UsageError: `text` is not a size.
    """
    match = _PATTERN.fullmatch(text)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise UsageError(f"'{text}' is not a size; write a number with a unit, such as 22GiB, 1.5GB or 512M")
    return Bytes(round(float(match[1]) * factor))


def format_bytes(count: int) -> str:
    """`count` bytes in the largest binary unit that keeps a digit before the point: `1.50 GiB`, `−3.0 MiB`, `512 B`."""
    # Two digits for GiB, as a tenth of a GiB is more than many plans save.
    for power, unit, digits in ((30, "GiB", 2), (20, "MiB", 1), (10, "KiB", 1)):
        if abs(count) >= 1 << power:
            return f"{count / (1 << power):.{digits}f} {unit}".replace("-", MINUS)
    return f"{count} B".replace("-", MINUS)


def format_seconds(seconds: float) -> str:
    """`seconds` in the unit that keeps three digits readable: `1.25 s`, `31.0 ms`, `8.2 µs`."""
    for factor, unit, digits in ((1.0, "s", 2), (1e-3, "ms", 1)):
        if abs(seconds) >= factor:
            return f"{seconds / factor:.{digits}f} {unit}"
    return f"{seconds * 1e6:.1f} µs"


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
