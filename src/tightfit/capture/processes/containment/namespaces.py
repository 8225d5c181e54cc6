"""A program in namespaces of its own (Linux): overlays take its writes, it has no network, and its processes end with it.

The superuser needs no namespace of users. Others get one in which they are who they are; it belongs to the server that forks the traced
processes (`tightfit.capture.processes.keeper`), since only from within one may a process make the others.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tightfit.capture.processes.containment import linux
from tightfit.capture.processes.containment.mounts import cover
from tightfit.capture.processes.containment.policy import DROPPED, Policy, containment_of

_entered: list[tuple[str, ...]] = []


def is_inside() -> bool:
    """Whether this process has entered namespaces of its own."""
    return bool(_entered)


def covered_folders() -> tuple[str, ...]:
    """The folders of this process, which is inside, that have an overlay."""
    return _entered[-1]


def needs_users() -> bool:
    """Whether a namespace of users is needed to make the others."""
    return os.geteuid() != 0


def found_space() -> bool:
    """Moves the next child of this process into a namespace of process ids of its own, where it is process 1.

    Returns False, and changes nothing, where the kernel forbids it or anything that a traced program needs there.
    """
    if not are_possible():
        return False
    _unshare_space()
    return True


def are_possible() -> bool:
    """Whether the kernel allows all that `enter` needs: it is tried in a child."""
    if needs_users() and os.geteuid() == _owner_of_others():
        # Within a namespace of users nothing would tell the files of others from this user's.
        return False
    with tempfile.TemporaryDirectory(prefix="tightfit-try-") as folder:
        (Path(folder) / DROPPED).mkdir()
        return _works_in_child(lambda: _try_out(Path(folder)))


def _owner_of_others() -> int:
    """Whom files of users that are not in a namespace of users seem to belong to; it is mostly the user "nobody"."""
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        # /proc is hidden.
        return 65534


def _unshare_space() -> None:
    user, group = os.geteuid(), os.getegid()
    if needs_users():
        linux.unshare(linux.NEW_NAMESPACE_OF_USERS | linux.NEW_NAMESPACE_OF_PIDS)
        linux.keep_identity(user, group)
    else:
        linux.unshare(linux.NEW_NAMESPACE_OF_PIDS)


def _try_out(folder: Path) -> None:
    _unshare_space()
    if not _works_in_child(lambda: enter(Policy(), folder, ())):
        raise OSError("not in the child")


def _works_in_child(attempt: Callable[[], None]) -> bool:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            attempt()
            code = 0
        except OSError:
            # The kernel's answer: no.
            pass
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


class ProcessSpace:
    """In process 1 of a space: a namespace of process ids for each traced program, emptied when the program has ended."""

    def __init__(self) -> None:
        self._own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._first: subprocess.Popen[bytes] | None = None
        # As process 1 the program would be treated otherwise by the kernel: signals that it sends to itself get lost. So another one is,
        # which waits on a pipe for nothing.
        self._reads, self._writes = os.pipe()
        waits = shutil.which("cat")
        self._waiting = [waits] if waits else [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]

    def open(self) -> None:
        """The next children of this process are in a new namespace."""
        linux.unshare(linux.NEW_NAMESPACE_OF_PIDS)
        self._first = subprocess.Popen(self._waiting, stdin=self._reads, stdout=subprocess.DEVNULL, cwd="/")

    def close(self) -> None:
        """Ends all processes of the namespace; they are gone when this returns."""
        assert self._first is not None
        self._first.send_signal(signal.SIGKILL)
        self._first.wait()
        linux.join(self._own, linux.NEW_NAMESPACE_OF_PIDS)


def enter_as(fields: dict[str, Any], folder: str) -> None:
    """Closes this process in as a request says; `folder` is its working folder.

    Raises:
        OSError: the kernel does not allow it.
    """
    containment = containment_of(fields)
    enter(containment.policy, Path(containment.shared), (*containment.paths, folder))


def enter(policy: Policy, shared: Path, paths: Iterable[str]) -> None:
    """Closes this process in, as `policy` says: it is already in its own namespace of process ids. Its working folder must be entered anew.

    Raises:
        OSError: the kernel does not allow it.
    """
    flags = linux.NEW_NAMESPACE_OF_MOUNTS
    if not policy.allow_network:
        flags |= linux.NEW_NAMESPACE_OF_NETWORK
    linux.unshare(flags)
    if policy.allow_writes:
        covered = []
        linux.mount("none", "/", flags=linux.RECURSIVE | linux.PRIVATE)
    else:
        covered = cover(shared, paths, as_owner=needs_users())
    linux.mount("proc", "/proc", "proc", linux.NO_SETUID | linux.NO_DEVICES | linux.NO_EXECUTION)
    if not policy.allow_network:
        linux.start_loopback()
    if needs_users():
        linux.give_up_capabilities()
    _entered.append(tuple(covered))
