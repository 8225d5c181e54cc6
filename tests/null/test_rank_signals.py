"""Signals that end a run on ranks: the script saves what it has on all of them, however long that takes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tightfit.ranks.rank_launch import FOLDER, TAKEN
from tightfit.ranks.rank_signals import RankSignals

# Whoever starts the tests may have Ctrl-C ignored, as a shell has for what it runs in the background.
LAUNCHER = """\
import signal, sys
from tightfit.ranks import rank_launch
signal.signal(signal.SIGINT, signal.default_int_handler)
rank_launch._KILL_SECONDS = 0.2
sys.exit(rank_launch.run_ranks([sys.executable, "-c", sys.argv[1]], 2, lambda line: None, on_cards=False))
"""
RANK = f"""\
import os, pathlib, signal, subprocess, sys, time
worker = subprocess.Popen(["sleep", "60"])
def save(*_):
    time.sleep(1)
    # It would have ended, and the rank with it, before the ranks meet.
    assert worker.poll() is None
    worker.kill()
    print("saved", flush=True)
    sys.exit(int(os.environ["RANK"]) and {113})
if HANDLES:
    signal.signal(signal.SIGTERM, save)
    pathlib.Path(os.environ["{FOLDER}"], "{TAKEN.format(int(signal.SIGTERM))}").touch()
try:
    pathlib.Path(os.environ["{FOLDER}"], os.environ["RANK"]).touch()
    while not all(os.path.exists(os.path.join(os.environ["{FOLDER}"], rank)) for rank in "01"):
        time.sleep(0.01)
    print("begun", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    save()
"""


@pytest.mark.parametrize(
    ("number", "handles", "code"),
    [(signal.SIGTERM, True, 0), (signal.SIGINT, False, 0), (signal.SIGTERM, False, 128 + signal.SIGTERM)],
)
def test_the_launcher_waits_for_what_the_script_does(number: int, handles: bool, code: int) -> None:
    program = RANK.replace("HANDLES", str(handles))
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, program], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "begun\n"
        launcher.send_signal(number)
        assert launcher.communicate(timeout=60)[0] == ("saved\n" if code == 0 else "")
    assert launcher.returncode == code


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """What a handler of the program's is called with; before and after it is that of the tests."""
    found: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, lambda number, _: found.append(number))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_is_handled_where_all_have_met(calls: list[int]) -> None:
    one, taken = RankSignals(), []
    one.taken = taken.append
    assert one.before_meeting() == 0
    assert taken == [signal.SIGINT, signal.SIGTERM]
    os.kill(os.getpid(), signal.SIGTERM)
    come = one.before_meeting()
    assert (calls, come) == ([], 1 << signal.SIGTERM)
    one.after_meeting(come)
    assert calls == [signal.SIGTERM]
    # One that has come to another rank first is handled with that one's, once.
    one.after_meeting(come)
    os.kill(os.getpid(), signal.SIGTERM)
    assert len(calls) == 2
    # Nobody is met: a second one is handled at once.
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    assert len(calls) == 3
    assert one.before_meeting() == 0
    # The program sets another one.
    signal.signal(signal.SIGTERM, lambda *_: calls.clear())
    one.before_meeting()
    os.kill(os.getpid(), signal.SIGTERM)
    one.after_meeting(one.before_meeting())
    assert calls == []
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        one.after_meeting(one.before_meeting())


def test_where_ranks_do_not_meet_it_is_handled_after_a_while(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightfit.ranks.rank_signals._PATIENCE_SECONDS", 0.05)
    one = RankSignals()
    one.before_meeting()
    os.kill(os.getpid(), signal.SIGTERM)
    until = time.monotonic() + 10
    while not calls and time.monotonic() < until:
        time.sleep(0.01)
    assert calls == [signal.SIGTERM]
