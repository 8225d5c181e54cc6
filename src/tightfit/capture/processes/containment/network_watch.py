"""Sees, in the traced process, what the program asks of the machine: the network is refused with an error that says why, and both are reported once.

The kernel refuses the network too where it can (`namespaces`), for what is not called through Python.
"""

import errno
import ipaddress
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tightfit.capture.processes.containment import namespaces
from tightfit.capture.processes.containment.policy import Policy
from tightfit.errors.faults import for_torch

_NETWORK_HINT = "--allow-network"
# Services of the C library itself, which look up users and hosts.
_LOCAL_SERVICES = ("/run/systemd/", "/run/nscd/", "/var/run/nscd/", "/var/lib/sss/", "/dev/log", "/run/dbus/")
# They look at the machine only. Python's `platform` and libraries that look for a GPU start them.
_ONLY_READ = ("uname", "nvidia-smi", "ldconfig", "lscpu")
# By as much may the clock of a file system be late.
_CLOCK_SECONDS = 0.1


class NetworkWatch:
    """What was seen since `begin`. There is one in a process: hooks stay for good."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._process, self._since = os.getpid(), time.time()
        self.refused: dict[str, None] = {}
        """The hosts, in order."""
        self.started: dict[str, None] = {}
        """The programs, in order."""
        self._answers: dict[str, Callable[..., None]] = {"subprocess.Popen": self._start, "os.system": self._system}
        self._answers |= {"os.posix_spawn": self._start, "os.exec": self._start}
        if not policy.allow_network:
            self._answers |= {"socket.connect": self._connect, "socket.sendto": self._connect}
            self._answers |= {"socket.sendmsg": self._connect, "socket.getaddrinfo": self._look_up}
            self._answers |= {"socket.gethostbyname": self._look_up}
        self._answers_now = True

    def begin(self) -> None:
        """From now on."""
        sys.addaudithook(self._hook)

    def end(self) -> None:
        """What comes later is ours."""
        self._answers_now = False

    def notes(self) -> list[tuple[str, str]]:
        """Where and what, as the assumptions of an estimate have it."""
        found = []
        if self.refused:
            hosts = ", ".join(self.refused)
            found.append(("network", f"{hosts}: refused while the program is traced; allow it with {_NETWORK_HINT}"))
        if self.started and not self._policy.allow_writes:
            what = "what it wrote was dropped" if namespaces.is_inside() else "it could write no files"
            found.append(("subprocess", f"{', '.join(self.started)}: run within the trace; {what}"))
        return found

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        answer = self._answers.get(event)
        if answer is not None and self._answers_now:
            answer(*arguments)

    def _start(self, program: Any, *_: Any) -> None:
        name = os.path.basename(os.fsdecode(program))
        if os.getpid() == self._process and name not in _ONLY_READ:
            self.started[name] = None

    def _system(self, command: Any) -> None:
        words = os.fsdecode(command).split()
        self._start(words[0] if words else "sh")

    def _connect(self, own: socket.socket, address: Any) -> None:
        # None for what is sent to where the socket is connected.
        if not address:
            return
        if own.family == socket.AF_UNIX:
            if not self._is_own_socket(address):
                self._refuse(os.fsdecode(address), ConnectionRefusedError)
        elif own.family in (socket.AF_INET, socket.AF_INET6) and not _is_local(address[0]):
            self._refuse(str(address[0]), ConnectionRefusedError)

    def _is_own_socket(self, address: Any) -> bool:
        path = os.fsdecode(address)
        # Those without a file are in the namespace of networks.
        if path.startswith(("\0", *_LOCAL_SERVICES)):
            return True
        try:
            # What was there before the program began belongs to somebody else.
            return os.stat(path).st_ctime >= self._since - _CLOCK_SECONDS
        except OSError:
            return True

    def _look_up(self, host: Any, *_: Any) -> None:
        if host and not _is_local(host):
            self._refuse(_text(host), socket.gaierror)

    def _refuse(self, host: str, kind: type[OSError]) -> None:
        self.refused[host] = None
        number = socket.EAI_AGAIN if kind is socket.gaierror else errno.ECONNREFUSED
        raise for_torch(kind(number, f"{host}: no network while a program is traced (allow it with {_NETWORK_HINT})"))


def _text(host: Any) -> str:
    return os.fsdecode(host) if isinstance(host, bytes) else str(host)


def _is_local(host: Any) -> bool:
    """Whether it is this machine, or an address of no use to reach another."""
    name = _text(host).partition("%")[0]
    if name.lower() in (
        "localhost",
        "localhost.localdomain",
        "ip6-localhost",
        "<broadcast>",
        socket.gethostname().lower(),
    ):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def rename_folders_by_copying() -> None:
    """Overlays of users other than the superuser cannot rename a folder that is below them: it is copied instead, as `mv` does."""
    for name in ("rename", "replace"):
        setattr(os, name, _renaming(getattr(os, name)))


def _renaming(real: Callable[..., None]) -> Callable[..., None]:
    def rename(src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        try:
            real(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        except OSError as error:
            is_there = src_dir_fd is None and dst_dir_fd is None and os.path.isdir(src)
            if (
                error.errno != errno.EXDEV
                or not is_there
                or os.stat(src).st_dev != os.stat(Path(os.fsdecode(dst)).absolute().parent).st_dev
            ):
                raise
            shutil.copytree(src, dst, symlinks=True)
            shutil.rmtree(src)

    rename.__name__ = real.__name__
    return rename
