"""The tables of a store, and how one is opened: to write, by one process, or to read.

A time is in whole milliseconds and grows with every reading, whatever the wall clock does (`agent/reading_clock.py`); `wall` beside it is what the wall clock said. Three levels hold
samples: readings, minutes and hours, each with the largest sample of its span, so that peaks survive. A sample belongs to a series: the memory of a card, or
of a process on a card as the driver, or as torch's allocator, counts it.
"""

import sqlite3
from pathlib import Path

from tightfit.errors import WatchError

SCHEMA_VERSION = 1
_APPLICATION_ID = 0x74666974  # "tfit"

LEVELS = ("readings", "minutes", "hours")
SPANS = {"minutes": 60_000, "hours": 3_600_000}
"""Milliseconds that a row of a level spans."""
USED, SEEN, ALLOCATED, RESERVED = "used", "seen", "allocated", "reserved"
"""Kinds of series: bytes by the driver's count; a process whose bytes the driver does not say (zeros); allocated and reserved by torch's allocator."""

_TABLES = (
    "CREATE TABLE status (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE cards (id INTEGER PRIMARY KEY, uuid TEXT NOT NULL UNIQUE, reading TEXT NOT NULL, time INTEGER NOT NULL)",
    "CREATE TABLE processes (id INTEGER PRIMARY KEY, pid INTEGER NOT NULL, identity TEXT NOT NULL, started REAL, user TEXT NOT NULL, "
    "command TEXT NOT NULL, container TEXT NOT NULL, UNIQUE (pid, identity))",
    # A card's own series has the process 0: NULLs are never equal to each other.
    # `last` is a time up to which it had samples, written when an hour is over.
    "CREATE TABLE series (id INTEGER PRIMARY KEY, kind TEXT NOT NULL, card INTEGER NOT NULL, process INTEGER NOT NULL, last INTEGER NOT NULL, "
    "UNIQUE (kind, card, process))",
    "CREATE TABLE moments (level TEXT NOT NULL, time INTEGER NOT NULL, wall INTEGER NOT NULL, PRIMARY KEY (level, time)) WITHOUT ROWID",
    # By time first: the samples of a reading are written beside each other, at the end.
    *(
        f"CREATE TABLE {level} (time INTEGER NOT NULL, series INTEGER NOT NULL, bytes INTEGER NOT NULL, PRIMARY KEY (time, series)) WITHOUT ROWID"
        for level in LEVELS
    ),
    "CREATE TABLE outlooks (series INTEGER PRIMARY KEY, made_at REAL NOT NULL, horizon_seconds REAL NOT NULL, quantile REAL NOT NULL, "
    "median_bytes INTEGER NOT NULL, upper_bytes INTEGER NOT NULL, growth_bytes_per_hour INTEGER NOT NULL, model TEXT NOT NULL, note TEXT NOT NULL)",
    "CREATE TABLE episodes (id INTEGER PRIMARY KEY, rule TEXT NOT NULL, subject TEXT NOT NULL, message TEXT NOT NULL, fired_at REAL NOT NULL, "
    "resolved_at REAL, UNIQUE (rule, subject, fired_at))",
)


def open_to_write(path: Path, *, max_bytes: int) -> sqlite3.Connection:
    """The store at `path`, made if there is none. It never grows above `max_bytes`.

    Raises:
        WatchError: it is the store of another version, or another program's database.
        sqlite3.Error: it is damaged, or the disk is full.
    """
    connection = sqlite3.connect(path, isolation_level=None, timeout=0.2, check_same_thread=False)
    try:
        # Written ahead, so that readers and the writer do not wait for each other. A process that is killed loses nothing that it
        # has committed; NORMAL: a machine that loses power loses the last seconds, and nothing is damaged.
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
        connection.execute(f"PRAGMA max_page_count = {max(64, max_bytes // page_bytes)}")
        if not _check(connection, path):
            _create(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def open_to_read(path: Path) -> sqlite3.Connection:
    """The store at `path`, which another process or thread may be writing.

    Raises:
        WatchError: there is none, or it cannot be read.
    """
    if not path.is_file():
        raise WatchError(f"{path}: there is no such history")
    try:
        connection = sqlite3.connect(
            f"{path.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None, timeout=1.0, check_same_thread=False
        )
        if not _check(connection, path):
            raise WatchError(f"{path}: this history is empty")
    except sqlite3.Error as error:
        raise WatchError(f"{path} cannot be read: {error}") from error
    return connection


def _check(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether it has our tables; False for an empty database."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if (application, version) == (_APPLICATION_ID, SCHEMA_VERSION):
        return True
    if application == _APPLICATION_ID and version:
        other = "a later" if version > SCHEMA_VERSION else "an earlier"
        raise WatchError(
            f"{path} is the history of {other} version of tightfit (schema {version}, this one has {SCHEMA_VERSION}); name another folder with --store"
        )
    if application or connection.execute("SELECT 1 FROM sqlite_master").fetchone():
        raise WatchError(f"{path} is the database of another program; name another folder with --store")
    return False


def _create(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    for table in _TABLES:
        connection.execute(table)
    # In the same transaction as the tables: a process that is killed here leaves none of it.
    connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute("COMMIT")
