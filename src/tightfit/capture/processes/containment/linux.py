"""The system calls of Linux that Python has no functions for; each raises OSError where the kernel refuses."""

import ctypes
import errno
import os
import socket
import struct
import sys
from typing import Any

NEW_NAMESPACE_OF_MOUNTS, NEW_NAMESPACE_OF_USERS = 0x20000, 0x10000000  # linux/sched.h
NEW_NAMESPACE_OF_PIDS, NEW_NAMESPACE_OF_NETWORK = 0x20000000, 0x40000000
NEW_NAMESPACE_OF_IPC = 0x08000000
READ_ONLY, NO_SETUID, NO_DEVICES, NO_EXECUTION = 1, 2, 4, 8  # linux/mount.h
NO_ACCESS_TIMES, NO_DIRECTORY_ACCESS_TIMES, REMOUNT, BIND = 1024, 2048, 32, 4096
RECURSIVE, PRIVATE, RELATIVE_ACCESS_TIMES = 16384, 1 << 18, 1 << 21
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36  # linux/prctl.h
_CAPABILITY_VERSION = 0x20080522  # linux/capability.h
_SIOCSIFFLAGS, _IFF_UP, _IFF_RUNNING = 0x8914, 0x1, 0x40  # linux/sockios.h, linux/if.h

_libc: Any = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def unshare(flags: int) -> None:
    """Gives this process namespaces of its own; that of process ids is for its next children."""
    check(_libc.unshare(flags), "unshare")


def join(namespace: int, flag: int) -> None:
    """Enters the namespace of an open file of /proc/PID/ns; that of process ids is for its next children."""
    check(_libc.setns(namespace, flag), "setns")


def mount(source: str, target: str, kind: str = "none", flags: int = 0, options: str = "") -> None:
    """mount(2)."""
    arguments = (os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), os.fsencode(options))
    check(_libc.mount(*arguments), f"mount {target}")


def signal_at_parents_end(number: int) -> None:
    """This process gets signal `number` when its parent ends; 0 for none."""
    check(_libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0), "prctl")


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process."""
    check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


def keep_identity(user: int, group: int) -> None:
    """In a new namespace of users: this user and group have the numbers that they have outside."""
    # A process that has changed its user may not write these files before.
    check(_libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")
    for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)


def give_up_capabilities() -> None:
    """Takes the rights away that a new namespace of users gives: with them a program could write files that it may not write."""
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    check(_libc.capset(header, bytes(24)), "capset")


def start_loopback() -> None:
    """Brings up the interface `lo` of a new namespace of networks."""
    # Not there on Windows.
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP | _IFF_RUNNING))


def may_write(path: str) -> bool:
    """Whether this process's user may write to it, be it in a file system that is mounted to be read only."""
    return _libc.access(os.fsencode(path), os.W_OK) == 0 or ctypes.get_errno() == errno.EROFS


def check(result: int, what: str) -> None:
    """Raises OSError for the error of a call that returned less than 0."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
