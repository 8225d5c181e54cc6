"""Captures are forked from one process that has imported torch, and are otherwise what fresh processes would be."""

import concurrent.futures
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tightfit.capture import processes
from tightfit.capture.targets import GeneratorFunction
from tightfit.capture.trace import trace
from tightfit.errors import CaptureError

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="forks are told of by pidfd, which Linux has")

WORKLOAD = """
import os
import signal
import sys
import time


def tells(what):
    raise RuntimeError(eval(what))
    yield


def dies():
    os.abort()
    yield


def kills_its_origin(own):
    if os.getppid() != own:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    raise RuntimeError("in a fresh process")
    yield


def waits(file):
    with open(file, "w") as opened:
        opened.write(str(os.getpid()))
    time.sleep(60)
    yield
"""
FOREVER = """
import sys
from tightfit.capture.targets import GeneratorFunction
from tightfit.capture.trace import trace
trace(GeneratorFunction(location=sys.argv[1], function="waits", parameters={"file": sys.argv[2]}), label="it", device="RTX 4090")
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "workload.py"
    path.write_text(WORKLOAD)
    return path


def said(file: Path, function: str, **parameters: object) -> str:
    """The error of a capture that comes to nothing."""
    target = GeneratorFunction(location=str(file), function=function, parameters=parameters)
    with pytest.raises(CaptureError) as caught:
        trace(target, label="it", device="RTX 4090")
    return str(caught.value)


def told(file: Path, what: str) -> str:
    return said(file, "tells", what=what).rpartition(": ")[2]


def exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def gone_within(seconds: float, process: int) -> bool:
    end = time.monotonic() + seconds
    while exists(process) and time.monotonic() < end:
        time.sleep(0.05)
    return not exists(process)


def test_captures_are_forked_from_one_process(file):
    who = "f'{os.getppid()} {os.getpid()} {len(os.listdir(\"/proc/self/task\"))}'"
    first, second = told(file, who).split(), told(file, who).split()
    assert first[0] == second[0] != str(os.getpid())
    assert first[1] != second[1]
    assert first[2] == second[2] == "1"


def test_a_capture_sees_the_environment_and_the_folder_as_they_are_now(file, tmp_path, monkeypatch):
    monkeypatch.setenv("SOMETHING", "one")
    assert told(file, "os.environ['SOMETHING']") == "one"
    monkeypatch.setenv("SOMETHING", "two")
    monkeypatch.chdir(tmp_path)
    assert told(file, "f'{os.environ[\"SOMETHING\"]} {os.getcwd()}'") == f"two {tmp_path}"


@pytest.mark.parametrize("value", [None, "3"])
def test_a_capture_has_the_variable_that_its_origin_needs_for_itself_as_the_user_set_it(file, monkeypatch, value):
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    if value is not None:
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", value)
    names = "str({n: v for n, v in os.environ.items() if 'OPENBLAS_NUM' in n}).replace(': ', '=')"
    assert told(file, names) == str({} if value is None else {"OPENBLAS_NUM_THREADS": value}).replace(": ", "=")


def test_the_death_of_a_capture_says_where_and_leaves_the_next_one_alone(file):
    died = said(file, "dies")
    assert "died with signal SIGABRT" in died
    assert "workload.py:14" in died
    assert told(file, "'still here'") == "still here"


def test_where_the_origin_is_gone_a_fresh_process_takes_over(file):
    assert said(file, "kills_its_origin", own=os.getpid()).endswith("in a fresh process")
    assert told(file, "'forked again'") == "forked again"


def test_an_origin_that_was_killed_between_captures_is_replaced(file):
    origin = int(told(file, "str(os.getppid())"))
    os.kill(origin, signal.SIGKILL)
    assert told(file, "str(os.getppid())") == str(os.getpid())
    assert told(file, "str(os.getppid())") not in (str(origin), str(os.getpid()))


def test_captures_may_run_at_the_same_time(file):
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda number: told(file, f"'{number}'"), range(3)))
    assert answers == ["0", "1", "2"]


def test_where_nothing_can_be_forked_every_process_is_fresh(file, monkeypatch):
    monkeypatch.setattr(processes._origins, "_is_possible", False)
    assert told(file, "str(os.getppid())") == str(os.getpid())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_who_asked(file, tmp_path, how):
    marker = tmp_path / "begun"
    with subprocess.Popen([sys.executable, "-c", FOREVER, str(file), str(marker)], stderr=subprocess.DEVNULL) as asking:
        while not marker.exists() or not marker.read_text():
            time.sleep(0.05)
        capture = int(marker.read_text())
        # The parent's id is the second field after the name, which ends with a parenthesis.
        origin = int(Path(f"/proc/{capture}/stat").read_text().rpartition(")")[2].split()[1])
        assert origin != asking.pid
        asking.send_signal(how)
    assert gone_within(10, capture)
    assert gone_within(10, origin)
