"""Calls that reach outside of the process's memory are noticed while a region runs, and what is printed, logged or only read is not."""

import contextlib
import cProfile
import io
import logging
import os
import queue
import signal
import sqlite3
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tightfit.effects.outside_calls import OutsideCalls, Unwatched, without_outside_calls


def seen_in(act: Callable[[], object]) -> str:
    with OutsideCalls() as calls:
        act()
    return calls.found


def test_what_writes_or_takes_away_is_seen_with_its_line(tmp_path: Path) -> None:
    tokens: queue.SimpleQueue[int] = queue.SimpleQueue()
    tokens.put(1)
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        acts: dict[str, Callable[[], object]] = {
            "open": lambda: (tmp_path / "text").write_text("1"),
            "mkdir": lambda: os.mkdir(tmp_path / "folder"),
            "get": tokens.get,
            "execute": lambda: database.execute("create table calls (number integer)"),
            "tofile": lambda: torch.zeros(1).numpy().tofile(tmp_path / "array"),
            "signal": lambda: signal.signal(signal.SIGUSR1, signal.getsignal(signal.SIGUSR1)),
            # It opens and writes a path in C++.
            "torch.serialization": lambda: torch.save(torch.zeros(1), tmp_path / "saved.pt"),
            "setitimer": lambda: signal.setitimer(signal.ITIMER_VIRTUAL, 0),
        }
        for name, act in acts.items():
            found = seen_in(act)
            assert found.partition(" ")[0] == name
            assert found.partition(" at ")[2].startswith("test_outside_calls.py:")


def test_what_torch_does_is_left_out_and_what_follows_is_seen(tmp_path: Path) -> None:
    def act() -> None:
        with Unwatched():
            os.listdir(tmp_path)
            os.mkdir(tmp_path / "unseen")
        os.mkdir(tmp_path / "seen")

    assert seen_in(act).startswith("mkdir at test_outside_calls.py:")
    with OutsideCalls() as calls, Unwatched():
        os.mkdir(tmp_path / "another")
    assert not calls.found
    calls_of_program: list[str] = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: calls_of_program.append(event))
    try:
        with OutsideCalls(), Unwatched():
            os.getpid()
    finally:
        sys.setprofile(before)
    assert "c_call" in calls_of_program


def test_what_is_shown_logged_read_or_handed_to_a_pool_is_not_seen(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("1")
    log = logging.getLogger("of this test")
    with (tmp_path / "log").open("w") as file, ThreadPoolExecutor(1) as pool:
        log.addHandler(logging.StreamHandler(file))
        log.warning("once")
        acts: list[Callable[[], object]] = [
            lambda: print("shown"),
            lambda: torch.save(torch.zeros(1), io.BytesIO()),
            lambda: sys.stdout.write("shown"),
            lambda: log.warning("logged"),
            path.read_text,
            lambda: pool.submit(torch.zeros, 2).result(),
            lambda: io.StringIO().write("kept"),
            lambda: torch.nn.Linear(2, 2)(torch.zeros(2)),
            lambda: os.environ.update(OF_A_TEST="1"),
        ]
        assert [seen_in(act) for act in acts] == [""] * len(acts)
        log.handlers.clear()
    del os.environ["OF_A_TEST"]


def test_profilers_of_the_program_stay(tmp_path: Path) -> None:
    events: list[str] = []

    def profiler(_frame: object, event: str, _argument: object) -> None:
        events.append(event)

    before = sys.getprofile()
    sys.setprofile(profiler)
    try:
        assert seen_in(lambda: os.mkdir(tmp_path / "folder")).startswith("mkdir")
        assert sys.getprofile() is profiler
        assert "c_call" in events
    finally:
        sys.setprofile(before)
    if before is None:
        with cProfile.Profile() as of_c:
            # From Python 3.12 on a profiler in C takes no place that ours could take from it.
            is_alone = sys.getprofile() is None
            assert bool(seen_in(lambda: os.mkdir(tmp_path / "other"))) == is_alone
            assert sys.getprofile() is (None if is_alone else of_c)
        assert any("mkdir" in str(row.code) for row in of_c.getstats())


def test_a_region_within_another_is_part_of_it_and_other_threads_are_not() -> None:
    tokens: queue.SimpleQueue[int] = queue.SimpleQueue()
    with OutsideCalls() as around:
        with OutsideCalls() as inside:
            tokens.put(1)
        assert sys.getprofile() == around._see
    assert around.found == inside.found != ""
    with OutsideCalls() as calls:
        thread = threading.Thread(target=tokens.put, args=(1,))
        thread.start()
        thread.join()
    assert calls.found == ""


def test_the_end_of_an_object_may_come_at_any_time(tmp_path: Path) -> None:
    class Ending:
        def __del__(self) -> None:
            os.mkdir(tmp_path / "folder")

    ending = [Ending(), tempfile.TemporaryDirectory()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        assert seen_in(ending.clear) == ""


def test_the_refusal_comes_after_the_block_and_an_error_of_the_block_before_it() -> None:
    tokens: queue.SimpleQueue[int] = queue.SimpleQueue()
    with pytest.raises(KeyError, match="calls put"), without_outside_calls(KeyError, is_on=True):
        tokens.put(1)
    assert tokens.qsize() == 1
    with pytest.raises(IndexError), without_outside_calls(KeyError, is_on=True):
        print(tokens.put(1), [*()].pop())
    with without_outside_calls(KeyError, is_on=False):
        tokens.put(1)
