"""What another process than the agent knows of the machine: the last reading in the store, and what the agent says of itself."""

import json
import sqlite3
from pathlib import Path
from typing import Any

from tightfit.watch.machine.machine_state import CardState, Episode, MachineState, Outlook, ProcessState
from tightfit.watch.machine.readings import CardReading, ProcessFacts
from tightfit.watch.store.schema import ALLOCATED, RESERVED, USED, open_to_read
from tightfit.watch.store.stored_history import outlooks_of, series_of_cards

_NUM_EPISODES = 50
_SAMPLES = """
SELECT c.uuid, s.kind, s.id, r.bytes, p.pid, p.identity, p.started, p.user, p.command, p.container
FROM readings r JOIN series s ON s.id = r.series JOIN cards c ON c.id = s.card JOIN processes p ON p.id = s.process
WHERE r.time = ?
"""
_EPISODES = """
SELECT rule, subject, message, fired_at, resolved_at FROM episodes
WHERE resolved_at IS NULL OR id > (SELECT max(id) FROM episodes) - ? ORDER BY fired_at DESC
"""


def stored_state(path: Path) -> MachineState:
    """The machine as the store at `path` has it.

    Raises:
        WatchError: there is no store, or it cannot be read.
        LookupError: it has no reading yet.
        sqlite3.Error: it cannot be read now.
    """
    connection = open_to_read(path)
    try:
        # One transaction, so that all is of one moment.
        connection.execute("BEGIN")
        return _state(connection)
    finally:
        connection.close()


def _state(connection: sqlite3.Connection) -> MachineState:
    said: dict[str, Any] = {
        key: json.loads(value) for key, value in connection.execute("SELECT key, value FROM status")
    }
    last = connection.execute(
        "SELECT time, wall FROM moments WHERE level = 'readings' ORDER BY time DESC LIMIT 1"
    ).fetchone()
    if last is None or "host" not in said:
        raise LookupError("the history has no reading yet")
    time, wall = last
    outlooks = outlooks_of(connection)
    of_cards = series_of_cards(connection)
    cards = [
        CardReading(**json.loads(reading))
        for (reading,) in connection.execute("SELECT reading FROM cards WHERE time = ?", (time,))
    ]
    return MachineState(
        host=said["host"],
        time=wall / 1000.0,
        source=said["source"],
        interval_seconds=said["interval_seconds"],
        lost_since=said["lost_since"],
        lost_reason=said["lost_reason"],
        cards=tuple(
            CardState(reading=each, outlook=outlooks.get(of_cards.get(each.uuid, -1)))
            for each in sorted(cards, key=lambda card: card.index)
        ),
        processes=_processes(connection, time, outlooks),
        episodes=tuple(
            Episode(**dict(zip(Episode.__slots__, row, strict=True)))
            for row in connection.execute(_EPISODES, (_NUM_EPISODES,))
        ),
        notes=tuple(said["notes"]),
    )


def _processes(connection: sqlite3.Connection, time: int, outlooks: dict[int, Outlook]) -> tuple[ProcessState, ...]:
    found: dict[tuple[str, int, str], dict[str, Any]] = {}
    for uuid, kind, series, size, *facts in connection.execute(_SAMPLES, (time,)):
        names = ("pid", "identity", "started", "user", "command", "container")
        process = found.setdefault(
            (uuid, facts[0], facts[1]), {"facts": ProcessFacts(**dict(zip(names, facts, strict=True)))}
        )
        process[kind] = size
        if kind == USED:
            process["outlook"] = outlooks.get(series)
    return tuple(
        ProcessState(
            facts=each["facts"],
            card=uuid,
            used_bytes=each.get(USED),
            allocated_bytes=each.get(ALLOCATED),
            reserved_bytes=each.get(RESERVED),
            outlook=each.get("outlook"),
        )
        for (uuid, _, _), each in found.items()
    )
