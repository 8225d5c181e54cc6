"""The agent's side of the socket: takes what programs publish, and believes the kernel and not the message who has sent it."""

import contextlib
import dataclasses
import json
import os
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any, Self

from tightfit.watch.publishing.publish import MAX_MESSAGE_BYTES, MESSAGE_VERSION
from tightfit.watch.publishing.socket_path import make_folder

_FRESH_SECONDS = 10.0
_MAX_PROCESSES = 10_000
_MAX_DEVICES = 64
_MAX_BYTES = 1 << 50
_CREDENTIALS = struct.Struct("iii")  # struct ucred of unix(7): PID, user, group


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TorchCounters:
    """Bytes of torch's allocator in one process on one card; `uuid` is torch's name for it, without a prefix."""

    uuid: str
    allocated_bytes: int
    reserved_bytes: int


class Listener:
    """Listens in a thread of its own, since the kernel holds few messages. `trouble` says why it does not; empty if it does."""

    def __init__(self, path: Path) -> None:
        self.trouble = ""
        self._path = path
        self._found: dict[int, tuple[float, tuple[TorchCounters, ...]]] = {}
        self._ending = False
        self._socket: socket.socket | None = None
        try:
            self._socket = _bound(path)
        except OSError as error:
            self.trouble = f"programs cannot publish their counters: {path}: {error.strerror or error}"
            return
        self._thread = threading.Thread(target=self._run, args=(self._socket,), name="tightfit listener", daemon=True)
        self._thread.start()

    def counters(self, pid: int) -> tuple[TorchCounters, ...]:
        """What a process has published in the last seconds; empty if nothing."""
        found = self._found.get(pid)
        return found[1] if found is not None and time.monotonic() - found[0] < _FRESH_SECONDS else ()

    @property
    def is_heard(self) -> bool:
        """Whether anybody has published of late."""
        return bool(self._found)

    def close(self) -> None:
        """Stops listening."""
        if self._socket is None:
            return
        self._ending = True
        # Wakes the thread up.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        with contextlib.suppress(OSError):
            self._path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, connection: socket.socket) -> None:
        swept = time.monotonic()
        space = socket.CMSG_SPACE(_CREDENTIALS.size)
        while not self._ending:
            try:
                data, beside, flags, _ = connection.recvmsg(MAX_MESSAGE_BYTES, space)
            except OSError:
                break
            now = time.monotonic()
            pid, found = _sender(beside), _parsed(data) if not flags & socket.MSG_TRUNC else None
            if pid and found and (pid in self._found or len(self._found) < _MAX_PROCESSES):
                self._found[pid] = (now, found)
            if now - swept >= _FRESH_SECONDS:
                swept = now
                self._found = {each: row for each, row in self._found.items() if now - row[0] < _FRESH_SECONDS}


def _bound(path: Path) -> socket.socket:
    """A socket at `path`, in the place of one that nobody listens at any more.

    Raises:
        OSError: it cannot be made, or another agent listens there.
    """
    if not hasattr(socket, "SO_PASSCRED"):
        raise OSError("only Linux says who has sent a message")
    make_folder(path)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(os.fspath(path))
            except ConnectionRefusedError:
                path.unlink()
            except FileNotFoundError:
                pass
            else:
                raise OSError(f"another agent listens at {path}")
        connection.bind(os.fspath(path))
        # Whoever may reach the folder may send; who it is says the kernel.
        os.chmod(path, 0o666)
    except BaseException:
        connection.close()
        raise
    return connection


def _sender(beside: list[tuple[int, int, bytes]]) -> int:
    """The PID of the sender, as the kernel says it, in this process's own numbering; 0 if it has none there."""
    for level, kind, data in beside:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS and len(data) >= _CREDENTIALS.size:
            return _CREDENTIALS.unpack(data[: _CREDENTIALS.size])[0]
    return 0


def _parsed(data: bytes) -> tuple[TorchCounters, ...] | None:
    """The counters in a message; None for anything that is not exactly such a message."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or content.get("version") != MESSAGE_VERSION:
        return None
    devices = content.get("devices")
    if not isinstance(devices, list) or not 1 <= len(devices) <= _MAX_DEVICES:
        return None
    found = [_counters(each) for each in devices]
    return None if None in found else tuple(each for each in found if each is not None)


def _counters(device: Any) -> TorchCounters | None:
    if not isinstance(device, dict):
        return None
    uuid, allocated, reserved = (device.get(key) for key in ("uuid", "allocated", "reserved"))
    if not isinstance(uuid, str) or type(allocated) is not int or type(reserved) is not int:
        return None
    if not 0 <= allocated <= reserved <= _MAX_BYTES or len(uuid) > 96:
        return None
    return TorchCounters(uuid=without_prefix(uuid), allocated_bytes=allocated, reserved_bytes=reserved)


def without_prefix(uuid: str) -> str:
    """A UUID as torch writes it: NVML has `GPU-` before it."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-").lower()
