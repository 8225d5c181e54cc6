"""What this process has of the machine's memory, apart from torch's own count: resident anonymous pages, and what the C library has handed out."""

import ctypes
import dataclasses
import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path

_STATUS = Path("/proc/self/status")
# Pages of files (a mapped data set) are the kernel's to take back, so only anonymous ones count.
_ANONYMOUS = re.compile(r"^RssAnon:\s*(\d+) kB", re.MULTILINE)


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc (malloc.h)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def resident_bytes() -> int | None:
    """Anonymous pages in memory; None where the system does not say."""
    try:
        found = _ANONYMOUS.search(_STATUS.read_text())
    except OSError:
        return None
    return None if found is None else int(found[1]) * 1024


@dataclasses.dataclass(frozen=True, slots=True)
class MallocUse:
    """What malloc has handed out and was not given back, and what it has of the system (the heap and maps of its own), in bytes."""

    handed_out: int
    of_system: int


def malloc_use() -> MallocUse | None:
    """The use of malloc; None without glibc 2.33."""
    ask = _mallinfo()
    if ask is None:
        return None
    info = ask()
    mapped = int(info.hblkhd)
    return MallocUse(handed_out=int(info.uordblks) + mapped, of_system=int(info.arena) + mapped)


@functools.cache
def _mallinfo() -> Callable[[], _MallocInfo] | None:
    if sys.platform != "linux":
        return None
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return None
    ask.restype, ask.argtypes = _MallocInfo, ()
    return ask
