"""The history: peaks survive, it stays small, and nothing that befalls its file ends the agent or loses what was written."""

import contextlib
import dataclasses
import errno
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.watch.machines import ScriptedSource, bench, simulated

from tightfit.errors import WatchError
from tightfit.units import GIB, MIB
from tightfit.watch.agent.agent import AgentSettings
from tightfit.watch.outlook.planner import OutlookSettings
from tightfit.watch.store.folder import StoreFolder
from tightfit.watch.store.levels import Retention
from tightfit.watch.store.reserve import Reserve
from tightfit.watch.store.schema import open_to_read
from tightfit.watch.store.stored_history import StoredHistory
from tightfit.watch.store.stored_state import stored_state

SETTINGS = AgentSettings(outlooks=OutlookSettings(share=0.0))


def small(**kept: int) -> AgentSettings:
    return dataclasses.replace(SETTINGS, retention=Retention(**kept))


def rows(database: Path, statement: str) -> list[tuple[int, ...]]:
    connection = open_to_read(database)
    try:
        return connection.execute(statement).fetchall()
    finally:
        connection.close()


class TestLevels:
    def test_a_peak_of_one_second_is_there_days_later(self, tmp_path: Path) -> None:
        source = ScriptedSource({1: GIB})
        found = bench(tmp_path, source, small(readings=100, minutes=100))
        for size in (GIB, 70 * GIB, GIB):
            source.used[1] = size
            found.ticks(1)
        found.ticks(100, seconds=1.0)
        found.ticks(150, seconds=120.0)
        assert rows(found.database, "SELECT count(*) FROM readings WHERE bytes > 2 << 30") == [(0,)]
        assert rows(found.database, "SELECT count(*) FROM minutes WHERE bytes > 2 << 30") == [(0,)]
        history = StoredHistory(found.database).of_card("GPU-0", seconds=3 * 86400, bins=300, num_layers=3)
        assert np.nanmax(history.used) == 70 * GIB
        assert np.nanmax(history.layers[0].values) == 70 * GIB

    def test_each_level_keeps_so_many_moments(self, tmp_path: Path) -> None:
        found = bench(tmp_path, ScriptedSource({1: GIB}), small(readings=50, minutes=20, hours=3))
        found.ticks(300, seconds=60.0)
        counts = dict(rows(found.database, "SELECT level, count(*) FROM moments GROUP BY level"))
        # What comes between two sweeps, once a minute, is on top.
        assert {
            level: count - kept for (level, count), kept in zip(sorted(counts.items()), (3, 20, 50), strict=True)
        } == {
            "hours": 0,
            "minutes": 0,
            "readings": 0,
        }

    def test_levels_say_the_same(self, tmp_path: Path) -> None:
        """Each minute's largest reading, and each hour's largest minute, to the byte."""
        found = bench(tmp_path, simulated(1, 4), SETTINGS)
        found.ticks(450, seconds=17.0)
        for level, below, span in (("minutes", "readings", 60_000), ("hours", "minutes", 3_600_000)):
            (last,) = rows(found.database, f"SELECT max(time) FROM {level}")[0]
            there = rows(found.database, f"SELECT time, series, bytes FROM {level} ORDER BY 1, 2")
            anew = rows(
                found.database,
                f"SELECT time / {span} * {span}, series, max(bytes) FROM {below} WHERE time < {last + span} GROUP BY 1, 2 ORDER BY 1, 2",
            )
            assert there == anew

    def test_minutes_that_an_ended_agent_left_are_written_by_the_next(self, tmp_path: Path) -> None:
        first = bench(tmp_path, ScriptedSource({1: GIB}), SETTINGS)
        first.ticks(90)
        first.agent.close()
        second = bench(tmp_path, ScriptedSource({1: GIB}), SETTINGS)
        second.clock.now = first.clock.now + 7200
        second.ticks(1)
        assert len(rows(second.database, "SELECT DISTINCT time FROM minutes")) == 2

    def test_processes_that_nobody_remembers_go(self, tmp_path: Path) -> None:
        source = ScriptedSource({})
        found = bench(tmp_path, source, small(readings=60, minutes=60, hours=2))
        for pid in range(100):
            source.used = {pid: GIB, 5000: GIB}
            found.ticks(5, seconds=600.0)
        assert rows(found.database, "SELECT count(*) FROM processes")[0][0] < 40
        assert rows(found.database, "SELECT count(*) FROM processes WHERE pid = 5000") == [(1,)]
        assert rows(found.database, "SELECT count(*) FROM readings WHERE series NOT IN (SELECT id FROM series)") == [
            (0,)
        ]


class TestCharts:
    def test_the_largest_processes_are_layers_and_the_rest_is_one(self, tmp_path: Path) -> None:
        source = ScriptedSource({pid: pid * GIB for pid in range(1, 7)})
        found = bench(tmp_path, source, SETTINGS)
        found.ticks(300)
        for seconds in (240, 3600):
            history = StoredHistory(found.database).of_card("GPU-0", seconds=seconds, bins=10, num_layers=4)
            assert [layer.pid for layer in history.layers] == [6, 5, 4, 3]
            assert history.others[-1] == 3 * GIB
            assert history.used[-1] == 21 * GIB
            assert history.times[-1] == pytest.approx(stored_state(found.database).time)

    def test_a_gap_is_a_gap(self, tmp_path: Path) -> None:
        found = bench(tmp_path, ScriptedSource({1: GIB}), SETTINGS)
        found.ticks(10)
        found.clock.now += 80
        found.ticks(10)
        history = StoredHistory(found.database).of_card("GPU-0", seconds=99, bins=10, num_layers=0)
        for values in (history.used, history.others):
            assert [value == value for value in values.tolist()] == [True, *[False] * 8, True]

    def test_a_card_that_is_not_there(self, tmp_path: Path) -> None:
        found = bench(tmp_path, ScriptedSource({}), SETTINGS)
        found.ticks(1)
        with pytest.raises(LookupError):
            StoredHistory(found.database).of_card("GPU-1'; DROP TABLE cards", seconds=60, bins=5, num_layers=1)


class TestTrouble:
    def test_a_file_that_is_locked_makes_readings_wait(self, tmp_path: Path) -> None:
        found = bench(tmp_path, ScriptedSource({1: GIB}), SETTINGS)
        found.ticks(5)
        other = sqlite3.connect(found.database, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        found.ticks(3)
        state = found.agent.state()
        assert state is not None
        assert any("database is locked; 3 readings wait" in note for note in state.notes)
        assert rows(found.database, "SELECT count(*) FROM moments WHERE level = 'readings'") == [(5,)]
        other.execute("ROLLBACK")
        other.close()
        found.ticks(4)
        assert found.agent.state().notes == ()  # type: ignore[union-attr]
        assert rows(found.database, "SELECT count(*) FROM moments WHERE level = 'readings'") == [(12,)]

    def test_a_reader_that_does_not_end_stops_the_writing_before_the_disk_is_full(self, tmp_path: Path) -> None:
        found = bench(tmp_path, simulated(2, 20), dataclasses.replace(SETTINGS, max_bytes=8 << 20))
        found.ticks(1)
        reader = open_to_read(found.database)
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM readings").fetchone()
        found.ticks(200)
        assert os.path.getsize(f"{found.database}-wal") < 1.2 * (1 << 20)
        state = found.agent.state()
        assert state is not None
        assert "another program holds the history open" in state.notes[0]
        reader.close()
        found.ticks(40)
        assert found.agent.state().notes == ()  # type: ignore[union-attr]
        assert rows(found.database, "SELECT count(*) >= 230 FROM moments WHERE level = 'readings'") == [(1,)]

    def test_a_history_that_may_not_grow_drops_what_is_oldest(self, tmp_path: Path) -> None:
        found = bench(tmp_path, simulated(2, 40), dataclasses.replace(SETTINGS, max_bytes=300 * 1024))
        found.ticks(250)
        assert found.database.stat().st_size <= 300 * 1024
        state = stored_state(found.database)
        assert state.time >= found.clock.wall() - 2
        assert rows(found.database, "SELECT count(*) > 40 FROM moments WHERE level = 'readings'") == [(1,)]

    @pytest.mark.skipif(
        not hasattr(os, "geteuid") or os.geteuid() != 0, reason="a full disk is a small tmpfs: needs root"
    )
    def test_a_disk_that_is_full_is_said_and_nothing_dies(self, tmp_path: Path) -> None:
        disk = tmp_path / "disk"
        disk.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)], capture_output=True, check=False
        )
        if mounted.returncode != 0:
            pytest.skip("a full disk is a small tmpfs, and none can be mounted here")
        try:
            found = bench(disk, simulated(2, 40), SETTINGS)
            found.ticks(60)
            filler = os.open(disk / "filler", os.O_WRONLY | os.O_CREAT)
            with contextlib.suppress(OSError):
                while os.write(filler, bytes(4096)):
                    pass
            os.close(filler)
            found.ticks(400)
            state = found.agent.state()
            assert state is not None
            assert any("no space for the history" in note for note in state.notes)
            assert state.time == found.clock.wall() - 1
            (disk / "filler").unlink()
            found.ticks(40)
            assert stored_state(disk / "history.sqlite").notes == ()
            found.agent.close()
        finally:
            subprocess.run(["umount", "-l", str(disk)], check=True)

    def test_a_file_that_is_deleted_is_made_anew(self, tmp_path: Path) -> None:
        found = bench(tmp_path, simulated(), SETTINGS)
        found.ticks(130)
        for path in tmp_path.glob("history.sqlite*"):
            path.unlink()
        found.ticks(130)
        stored, state = stored_state(found.database), found.agent.state()
        assert state is not None
        assert stored.cards == state.cards
        assert sorted(stored.processes, key=str) == sorted(state.processes, key=str)

    @pytest.mark.parametrize("is_running", [False, True])
    def test_a_file_that_is_damaged_is_set_aside(self, tmp_path: Path, is_running: bool) -> None:
        found = bench(tmp_path, simulated(), SETTINGS)
        found.ticks(30)
        if not is_running:
            found.agent.close()
        for path in tmp_path.glob("history.sqlite*"):
            path.write_bytes(os.urandom(40_000))
        after = found if is_running else bench(tmp_path, simulated(), SETTINGS)
        after.clock.now = found.clock.now
        after.ticks(10)
        assert stored_state(found.database).time == pytest.approx(after.clock.wall() - 1)
        assert (tmp_path / "history.sqlite.damaged").exists()

    @pytest.mark.parametrize("is_running", [False, True])
    def test_a_file_that_is_damaged_behind_its_first_page_is_set_aside(self, tmp_path: Path, is_running: bool) -> None:
        found = bench(tmp_path, simulated(), SETTINGS)
        found.ticks(100)
        if not is_running:
            found.agent.close()
        else:
            connection = sqlite3.connect(found.database)
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            connection.close()
        with open(found.database, "r+b") as file:
            for at in range(4096, os.path.getsize(found.database), 4096):
                file.seek(at)
                file.write(b"\xff" * 64)
        after = found if is_running else bench(tmp_path, simulated(), SETTINGS)
        after.clock.now = found.clock.now
        after.ticks(100)
        assert stored_state(found.database).time == pytest.approx(after.clock.wall() - 1)
        assert (tmp_path / "history.sqlite.damaged").exists()
        assert sqlite3.connect(found.database).execute("PRAGMA integrity_check").fetchone() == ("ok",)

    def test_the_history_of_a_later_version_is_refused(self, tmp_path: Path) -> None:
        found = bench(tmp_path, simulated(), SETTINGS)
        found.ticks(1)
        found.agent.close()
        connection = sqlite3.connect(found.database)
        connection.execute("PRAGMA user_version = 2")
        connection.close()
        with pytest.raises(WatchError, match="a later version of tightfit"):
            bench(tmp_path, simulated(), SETTINGS)
        with pytest.raises(WatchError, match="a later version of tightfit"):
            stored_state(found.database)

    def test_another_programs_database_is_not_touched(self, tmp_path: Path) -> None:
        path = tmp_path / "history.sqlite"
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE cookies (value)")
        connection.close()
        before = path.read_bytes()
        with pytest.raises(WatchError, match="another program"):
            bench(tmp_path, simulated(), SETTINGS)
        # The journal mode is in the head of the file; the tables are as they were.
        assert sqlite3.connect(path).execute("SELECT name FROM sqlite_master").fetchall() == [("cookies",)]
        assert len(path.read_bytes()) == len(before)


def test_a_file_system_that_sets_nothing_aside_gets_a_reserve_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    (tmp_path / "reserve").touch()
    monkeypatch.setattr(os, "posix_fallocate", refused, raising=False)
    Reserve(tmp_path / "reserve").fill()
    assert (tmp_path / "reserve").stat().st_size == 8 * MIB


KILLED = """
import sys
from pathlib import Path
from tests.watch.machines import bench, simulated
found = bench(Path(sys.argv[1]), simulated(2, 20))
found.clock.now += float(sys.argv[2])
while True:
    found.ticks(1)
    print(round(found.clock.wall() - 1), flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs kill -9")
def test_an_agent_that_is_killed_loses_at_most_its_last_reading(tmp_path: Path) -> None:
    """`python -m benchmarks.watch` does it a hundred times."""
    for turn in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path), str(turn * 10_000)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            said = [int(process.stdout.readline()) for _ in range(20 + turn)]
            process.send_signal(signal.SIGKILL)
            said += [int(line) for line in process.stdout.read().split()]
        times = [
            time
            for (time,) in rows(tmp_path / "history.sqlite", "SELECT time / 1000 FROM moments WHERE level = 'readings'")
        ]
        assert set(said) <= set(times)
        assert rows(tmp_path / "history.sqlite", "PRAGMA integrity_check") == [("ok",)]


def test_one_process_has_the_lock_and_it_is_free_when_that_ends(tmp_path: Path) -> None:
    folder = StoreFolder(tmp_path / "watch")
    assert not folder.is_locked()
    code = "import sys; from pathlib import Path; from tightfit.watch.store.folder import StoreFolder; print(StoreFolder(Path(sys.argv[1])).lock(), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        assert folder.is_locked()
        assert not folder.lock()
        assert folder.holder() == process.pid
        process.kill()
    assert folder.lock()
    assert folder.path.stat().st_mode & 0o077 == 0
    folder.unlock()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WatchError, match="--store"):
        StoreFolder(tmp_path / "file" / "watch").lock()
    assert shutil.disk_usage(tmp_path).free > MIB
