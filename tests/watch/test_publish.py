"""Counters that programs publish: one line, never in the way, believed as far as the kernel vouches for the sender."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.watch.machines import ScriptedSource, bench

from tightfit.units import GIB
from tightfit.watch.agent.agent import AgentSettings
from tightfit.watch.outlook.planner import OutlookSettings
from tightfit.watch.publishing.listener import Listener, _parsed
from tightfit.watch.store.stored_state import stored_state

pytestmark = pytest.mark.skipif(not hasattr(socket, "SO_PASSCRED"), reason="needs Linux's credentials on sockets")

PROGRAM = """
import sys, types, time
torch = types.ModuleType("torch")
torch.cuda = types.SimpleNamespace(
    is_initialized=lambda: True,
    device_count=lambda: 2,
    memory_reserved=lambda index: (3 << 30) * (index == 0),
    memory_allocated=lambda index: 2 << 30,
    get_device_properties=lambda index: types.SimpleNamespace(uuid="0"),
)
sys.modules["torch"] = torch
import tightfit.watch
tightfit.watch.publish(interval=0.1)
tightfit.watch.publish(interval=0.1)
print("going", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIGHTFIT_WATCH_SOCKET", str(tmp_path / "s" / "watch.sock"))
    return tmp_path / "s" / "watch.sock"


@pytest.fixture
def listener(path: Path) -> Iterator[Listener]:
    with Listener(path) as found:
        yield found


def send(path: Path, message: object) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
        connection.sendto(message if isinstance(message, bytes) else json.dumps(message).encode(), os.fspath(path))


def message(allocated: object = GIB, reserved: object = 2 * GIB, uuid: object = "abc") -> dict[str, object]:
    return {"version": 1, "devices": [{"uuid": uuid, "allocated": allocated, "reserved": reserved}]}


def wait_for(listener: Listener, pid: int) -> None:
    deadline = time.monotonic() + 60
    while not listener.counters(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_program_publishes_with_one_line_and_the_agent_shows_it(tmp_path: Path, path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        source = ScriptedSource({process.pid: 4 * GIB, 1: GIB})
        wanted = AgentSettings(outlooks=OutlookSettings(share=0.0), listen_at=path)
        found = bench(tmp_path / "store", source, wanted)
        wait_for(found.agent._listener, process.pid)  # type: ignore[arg-type]
        found.ticks(2)
        for state in (found.agent.state(), stored_state(found.database)):
            assert state is not None
            counts = {each.facts.pid: (each.allocated_bytes, each.reserved_bytes) for each in state.processes}
            assert counts == {process.pid: (2 * GIB, 3 * GIB), 1: (None, None)}
        # The agent goes and comes: the program does not notice.
        found.agent.close()
        assert not path.exists()
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.wait(60) == 0


def test_without_torch_without_cuda_and_without_an_agent_nothing_happens(path: Path) -> None:
    code = "import sys, tightfit.watch; tightfit.watch.publish(interval=0.1); import time; time.sleep(0.5); print('torch' in sys.modules, 'numpy' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (answer.stdout, answer.stderr) == ("False False\n", "")


def test_cuda_is_not_started_and_its_errors_are_the_programs() -> None:
    code = """
import sys, types, time
def fail(*_): raise RuntimeError("CUDA error")
torch = types.ModuleType("torch")
torch.cuda = types.SimpleNamespace(is_initialized=lambda: False, device_count=fail)
sys.modules["torch"] = torch
import tightfit.watch
tightfit.watch.publish(interval=0.1)
time.sleep(0.3)
torch.cuda.is_initialized = lambda: True
time.sleep(0.3)
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stderr == ""


def test_a_forked_child_does_not_publish_and_can_begin_to() -> None:
    code = """
import os, threading, tightfit.watch
tightfit.watch.publish()
publishing = lambda: any(thread.name == "tightfit publish" for thread in threading.enumerate())
pid = os.fork()
if pid == 0:
    before = publishing()
    tightfit.watch.publish()
    os._exit(0 if not before and publishing() else 1)
assert os.waitpid(pid, 0)[1] == 0 and publishing()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


def test_the_kernel_says_who_it_is(listener: Listener, path: Path) -> None:
    send(path, {**message(), "pid": 1})
    wait_for(listener, os.getpid())
    assert listener.counters(1) == ()
    (found,) = listener.counters(os.getpid())
    assert (found.allocated_bytes, found.reserved_bytes, found.uuid) == (GIB, 2 * GIB, "abc")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04K\x01.",
        b"null",
        b"[" * 5000,
        b'{"version": 1, "devices": ' + b"[1, " * 2000,
        {"version": 2, "devices": []},
        {"version": 1, "devices": {}},
        {"version": 1, "devices": [1]},
        message(allocated=-1),
        message(allocated=True),
        message(allocated=1.5),
        message(allocated=3 * GIB, reserved=2 * GIB),
        message(reserved=1 << 60),
        message(uuid="a" * 97),
        message(uuid=None),
        {"version": 1, "devices": message()["devices"] * 65},  # type: ignore[operator]
    ],
    ids=str,
)
def test_anything_else_counts_for_nothing(data: object, listener: Listener, path: Path) -> None:
    for each in (data, b"x" * 60_000):
        send(path, each)
    send(path, message(allocated=7))
    wait_for(listener, os.getpid())
    assert listener.counters(os.getpid())[0].allocated_bytes == 7


@settings(max_examples=40)
@given(st.binary(max_size=300) | st.text(max_size=100).map(str.encode))
def test_no_bytes_break_the_reader(data: bytes) -> None:
    assert _parsed(data) is None


def test_the_place_of_an_agent_that_was_killed_is_taken_and_that_of_a_living_one_not(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stale:
        stale.bind(os.fspath(path))
    with Listener(path) as first:
        assert first.trouble == ""
        with Listener(path) as second:
            assert "another agent listens" in second.trouble
        send(path, message())
        wait_for(first, os.getpid())


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs another user's folder")
def test_the_folder_of_somebody_else_is_not_used(path: Path) -> None:
    path.parent.mkdir()
    os.chown(path.parent, 12345, 12345)
    with Listener(path) as found:
        assert "belongs to another user" in found.trouble


def test_an_interval_that_is_no_interval() -> None:
    from tightfit.watch import publish

    with pytest.raises(ValueError, match="too short"):
        publish(interval=0)
