"""A file of a few MiB beside the history that is given up when the disk is full: SQLite needs space even to delete."""

import contextlib
import os
import shutil
from pathlib import Path

from tightfit.units import MIB

_BYTES = 8 * MIB
_MIN_FREE_BYTES = 64 * MIB


class Reserve:
    """The file `path`, with blocks of the disk behind it where there are plenty."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def fill(self) -> None:
        """Takes the space, unless it is taken or the disk is nearly full."""
        with contextlib.suppress(OSError):
            is_taken = self._path.exists() and self._path.stat().st_size >= _BYTES
            if is_taken or shutil.disk_usage(self._path.parent).free < _MIN_FREE_BYTES:
                return
            with open(self._path, "wb") as file:
                try:
                    os.posix_fallocate(file.fileno(), 0, _BYTES)
                # Not on every system, nor on every file system.
                except (AttributeError, OSError):
                    file.write(bytes(_BYTES))

    def give_up(self) -> None:
        """Gives the space back to the disk."""
        with contextlib.suppress(OSError):
            self._path.unlink()
