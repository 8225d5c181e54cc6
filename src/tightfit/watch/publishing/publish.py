"""The one line in a training program: a thread that sends torch's counters to the agent of the machine, and is never in the program's way.

It waits for nobody: what the agent does not take at once is gone. torch is asked only if the program has imported it and uses a GPU; the thread neither imports it nor starts
CUDA. A process that is forked does not publish until it says so itself.
"""

import atexit
import contextlib
import json
import os
import socket
import sys
import threading
from typing import Any

from tightfit.watch.publishing.socket_path import sending_paths

MESSAGE_VERSION = 1
MAX_MESSAGE_BYTES = 8192
_MIN_INTERVAL_SECONDS = 0.1
_END_SECONDS = 2.0

_ending: threading.Event | None = None


def publish(*, interval: float = 1.0) -> None:
    """Sends what torch's allocator has allocated and reserved on each GPU to the agent of this machine, every `interval` seconds, until the program ends.

    Without an agent, without torch or before the first use of a GPU nothing is sent. A second call changes nothing.

    Raises:
        ValueError: the interval is shorter than a tenth of a second.
    """
    global _ending  # noqa: PLW0603 - one thread a process, whoever asks for it
    if interval < _MIN_INTERVAL_SECONDS:
        raise ValueError(f"an interval of {interval} seconds is too short; at least {_MIN_INTERVAL_SECONDS}")
    # The agent is Linux's alone.
    if _ending is not None or not hasattr(socket, "SO_PASSCRED"):
        return
    ending = _ending = threading.Event()
    thread = threading.Thread(target=_run, args=(ending, interval), name="tightfit publish", daemon=True)
    thread.start()

    def end() -> None:
        # Before the interpreter takes torch apart under the thread.
        ending.set()
        thread.join(_END_SECONDS)

    atexit.register(end)


def counters() -> list[dict[str, Any]]:
    """Bytes of torch's allocator on each GPU that the process uses; empty without torch, or before CUDA has started."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    # While another thread is importing torch, parts of it are not there yet.
    if cuda is None or not getattr(cuda, "is_initialized", lambda: False)():
        return []
    found = []
    for index in range(cuda.device_count()):
        reserved = cuda.memory_reserved(index)
        if reserved:
            uuid = str(getattr(cuda.get_device_properties(index), "uuid", ""))
            found.append({"uuid": uuid, "allocated": int(cuda.memory_allocated(index)), "reserved": int(reserved)})
    return found


def _run(ending: threading.Event, interval: float) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
        connection.setblocking(False)
        while not ending.wait(interval):
            try:
                devices = counters()
            except RuntimeError:
                # A CUDA error belongs to the program, which meets it itself: here it ends the counting.
                return
            if devices:
                _send(connection, devices)


def _send(connection: socket.socket, devices: list[dict[str, Any]]) -> None:
    message = json.dumps({"version": MESSAGE_VERSION, "devices": devices}).encode()
    if len(message) <= MAX_MESSAGE_BYTES:
        for path in sending_paths():
            # There is no agent, or it has no place: both may be otherwise in a second.
            with contextlib.suppress(OSError):
                connection.sendto(message, os.fspath(path))


def _after_fork() -> None:
    global _ending  # noqa: PLW0603 - the thread is not in the child
    _ending = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
