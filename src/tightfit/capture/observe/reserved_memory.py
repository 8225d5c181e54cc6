"""Addresses without memory: pages that nobody writes to cost nothing."""

import mmap
import sys

# Python 3.11 has no name for it (sys/mman.h of Linux and of macOS).
_MAP_NORESERVE = {"linux": 0x4000, "darwin": 0x40}.get(sys.platform, 0)


def reserved(num_bytes: int) -> mmap.mmap:
    """`num_bytes` of zeros; without MAP_NORESERVE a system refuses to reserve more than it has."""
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
