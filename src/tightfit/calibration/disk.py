"""Read and write bandwidth of a folder's disk past the page cache, with a few threads: what a disk tier can count on.

A file is opened with O_DIRECT and transferred in blocks with `os.preadv` and `os.pwritev` from page-aligned buffers. Both release the GIL while
they wait.
"""

import contextlib
import errno
import functools
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tightfit.calibration.instruments import Findings, Instruments, summary
from tightfit.devices.calibration import Calibration

# One thread does not saturate a fast disk: on a shared virtual disk one dd with O_DIRECT wrote 2.3 GB/s, 2 to 4 threads 5.2 GB/s.
_NUM_THREADS = 4
_MAX_SAMPLES = 3
# A slow disk is read and written once.
_ENOUGH_SECONDS = 4.0


def disk(instruments: Instruments, folder: Path) -> Findings:
    """Rates of O_DIRECT in `folder`; nothing where its file system does not take O_DIRECT, as a RAM disk does not.

    Raises:
        OSError: the folder may not be written, or is full.
    """
    num_bytes, block = instruments.sizes.disk_bytes, instruments.sizes.disk_block_bytes
    rates, rows = {}, []
    with _scratch_file(folder) as file:
        if file is None:
            return Findings(rows=[], tables={})
        # Written first: reading a sparse file would return zeros without touching the disk.
        for way, move in (("write", os.pwritev), ("read", os.preadv)):
            key = f"{way}_bytes_per_second"
            expected = functools.partial(_expected, num_bytes, key)
            run = functools.partial(_move_all, move, file, num_bytes, block)
            samples: list[float] = []
            while len(samples) < _MAX_SAMPLES and sum(samples) < _ENOUGH_SECONDS:
                samples.append(instruments.seconds_of(run, expected))
            rows.append(summary(f"disk {way}, {_NUM_THREADS} threads", "B/s", [num_bytes / s for s in samples]))
            rates[key] = rows[-1].median
    return Findings(rows=rows, tables={"disk": rates | {"num_threads": _NUM_THREADS, "block_bytes": block}})


def _expected(num_bytes: int, key: str, calibration: Calibration | None) -> float | None:
    return num_bytes / calibration.disk[key] if calibration else None


@contextlib.contextmanager
def _scratch_file(folder: Path) -> Iterator[int | None]:
    """A file descriptor open for O_DIRECT, of a file that does not outlive it; None where the file system refuses O_DIRECT."""
    descriptor, path = tempfile.mkstemp(dir=folder, prefix="tightfit-calibrate-")
    os.close(descriptor)
    try:
        direct = os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        # open(2): "EINVAL: the filesystem does not support the O_DIRECT flag", as tmpfs did not before Linux 6.6.
        if error.errno != errno.EINVAL:
            raise
        direct = None
    finally:
        # While it is open: the space is given back even if the process is killed.
        os.unlink(path)
    try:
        yield direct
    finally:
        if direct is not None:
            os.close(direct)


def _move_all(move: Callable[..., int], file: int, num_bytes: int, block: int) -> None:
    """Reads or writes the whole file, each thread every n-th block from a buffer of its own."""

    def move_some(first: int) -> None:
        # O_DIRECT wants buffers aligned to the logical block size (open(2), NOTES); anonymous mappings start at a page.
        with mmap.mmap(-1, block) as buffer:
            for at in range(first * block, num_bytes, _NUM_THREADS * block):
                moved = move(file, [buffer], at)
                assert moved == block, "a regular file moves whole blocks"

    with ThreadPoolExecutor(max_workers=_NUM_THREADS) as pool:
        list(pool.map(move_some, range(_NUM_THREADS)))
