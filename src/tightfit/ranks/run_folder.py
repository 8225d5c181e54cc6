"""The folder of a run on several ranks, which goes with the run: what one left that was killed is removed by the next.

A lock says whether a run is alive, and not the number of its process: that is another's in another container with the same folder for temporary files. Its ranks hold it too. Without torch.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:
    # Nothing is locked there, and so nothing of others removed.
    fcntl = None

_PREFIX, _LOCK = "tightfit-ranks-", "lock"


@contextlib.contextmanager
def run_folder() -> Iterator[tuple[Path, tuple[int, ...]]]:
    """A new folder, and what processes have to inherit that keep it; it is removed at the end of the block."""
    _remove_left_ones()
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as folder:
        if fcntl is None:
            yield Path(folder), ()
            return
        # It gets its name when it is locked: one without is that of a run which begins.
        own = os.open(f"{folder}/begins", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(own, fcntl.LOCK_EX)
            os.rename(f"{folder}/begins", f"{folder}/{_LOCK}")
            yield Path(folder), (own,)
        finally:
            os.close(own)


def _remove_left_ones() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        # Of another user, or removed meanwhile.
        with contextlib.suppress(OSError):
            if fcntl is None or folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
