"""Landlock: the kernel refuses this process, and what it starts, to write anywhere but in a few folders. Needs no rights, and no namespaces."""

import ctypes
import os
import struct
import sys
from typing import Any

from tightfit.capture.processes.containment import linux

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446  # asm-generic/unistd.h
_VERSION, _BENEATH = 1, 1  # linux/landlock.h
_PR_SET_NO_NEW_PRIVS = 38
_WRITE_FILE = 1 << 1
# Removing and making of all kinds, the bits 4 to 12; moving between folders and truncating are newer.
_CHANGES = sum(1 << bit for bit in range(4, 13))
_MOVES, _TRUNCATES = 1 << 13, 1 << 14
_DEVICES = ("/dev", "/proc")

_libc: Any = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def is_possible() -> bool:
    """Whether the kernel has it."""
    return sys.platform == "linux" and _version() >= 1


def _version() -> int:
    return _libc.syscall(_CREATE, None, 0, _VERSION)


def restrict(*folders: str) -> bool:
    """From now on the calling thread, and what it starts, writes below `folders` alone; False where the kernel has no Landlock."""
    if not is_possible():
        return False
    version = _version()
    handled = _WRITE_FILE | _CHANGES | (_MOVES if version >= 2 else 0) | (_TRUNCATES if version >= 3 else 0)
    attributes = struct.pack("=Q", handled)
    rules = _libc.syscall(_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    if rules < 0:
        return False
    try:
        for folder in (*folders, *_DEVICES):
            descriptor = os.open(folder, os.O_PATH)
            rule = struct.pack("=Qi", handled, descriptor)
            linux.check(_libc.syscall(_ADD_RULE, rules, _BENEATH, rule, 0), "landlock_add_rule")
            os.close(descriptor)
        linux.check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
        linux.check(_libc.syscall(_RESTRICT, rules, 0), "landlock_restrict_self")
    finally:
        os.close(rules)
    return True
