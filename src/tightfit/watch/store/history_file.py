"""The file of a history: opened or made anew, with what SQLite writes ahead kept small, and room made where the disk is full."""

import contextlib
import os
import sqlite3
from pathlib import Path

from tightfit.watch.store.levels import drop_half
from tightfit.watch.store.schema import open_to_write

NO_DATABASE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
PRIMARY = 0xFF
"""The lower byte of SQLite's extended result codes."""
_WAL_SHARE = 8
"""The file written ahead may be an eighth of what the history may be: a checkpoint keeps it at 4 MiB, unless a reader is in the way."""


def is_damage(error: sqlite3.Error) -> bool:
    """Whether SQLite says that the file is no database, or a damaged one. Damage may lie in any page: in one that is read long after the file was opened, too."""
    # What Python's own layer raises, as for a connection that is closed, has no code.
    return getattr(error, "sqlite_errorcode", 0) & PRIMARY in NO_DATABASE


class HistoryFile:
    """The history at `path`, open for one writer."""

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        """Opens it; a damaged one is set aside.

        Raises:
            WatchError: it is the history of another version, or another program's database.
            sqlite3.Error: it cannot be opened at all.
        """
        self._path, self._max_bytes = path, max_bytes
        self.connection = self._open()

    def is_held_open(self) -> bool:
        """Whether the file written ahead is large and cannot be emptied, because a reader's transaction does not end: it would take the whole disk."""
        try:
            if os.stat(f"{self._path}-wal").st_size < self._max_bytes // _WAL_SHARE:
                return False
        except OSError:
            return False
        (is_busy, *_) = self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return bool(is_busy)

    def make_room(self) -> None:
        """Drops the older half of the history."""
        self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        drop_half(self.connection)
        self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def is_same_file(self) -> bool:
        """Whether what is open is what is at the path; SQLite would go on writing to a file that was deleted."""
        try:
            return os.stat(self._path).st_ino == self._inode
        except OSError:
            return False

    def begin_anew(self, *, is_damaged: bool = False) -> bool:
        """Goes on with a new file, as the old one is gone or damaged; False if that cannot be."""
        self.connection.close()
        with contextlib.suppress(sqlite3.Error, OSError):
            # What lies at the path may be another file by now, with nothing wrong in it.
            if is_damaged and self.is_same_file():
                self._set_aside()
            self.connection = self._open()
            return True
        return False

    def _open(self) -> sqlite3.Connection:
        try:
            connection = open_to_write(self._path, max_bytes=self._max_bytes)
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            self._set_aside()
            connection = open_to_write(self._path, max_bytes=self._max_bytes)
        self._inode = os.stat(self._path).st_ino
        return connection

    def _set_aside(self) -> None:
        self._path.replace(self._path.with_name(f"{self._path.name}.damaged"))
        for suffix in ("-wal", "-shm"):
            Path(f"{self._path}{suffix}").unlink(missing_ok=True)
