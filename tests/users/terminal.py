"""A command at a terminal: a real pseudo-terminal with its size, its colours and its Ctrl-C; what it shows in the end is given as plain lines."""

import dataclasses
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

LIMIT_SECONDS = 600.0
"""No command of these small programs takes longer, not even on a busy machine: it is ended then, and the test fails."""
_COLUMNS, _ROWS = 120, 40
_CTRL_C = b"\x03"
# Ctrl-C reaches a process only through the terminal that controls it, which a process takes for itself.
_TAKES_THE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a command has left on the terminal. `raw` has every character that it wrote, also what it has erased again."""

    exit_code: int
    lines: tuple[str, ...]
    seconds: float
    raw: str

    @property
    def first(self) -> str:
        """The first line."""
        return self.lines[0] if self.lines else ""

    @property
    def text(self) -> str:
        """All lines."""
        return "\n".join(self.lines)


def typed(folder: Path, *words: str, interrupt_at: Callable[[str], bool] | None = None) -> Shown:
    """Types `tightfit WORDS...` in a folder. `interrupt_at` is asked after each output, with all of it, whether to press Ctrl-C now; it is pressed once.

    Raises:
        AssertionError: the command did not end within `LIMIT_SECONDS`.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
    started = time.monotonic()
    command = [sys.executable, "-c", _TAKES_THE_TERMINAL, sys.executable, "-m", "tightfit", *words]
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS")} | {"TERM": "xterm-256color"}
    process = subprocess.Popen(
        command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env=environment
    )
    os.close(theirs)
    written = bytearray()
    is_pressed = interrupt_at is None
    try:
        while select.select([ours], [], [], max(0.0, started + LIMIT_SECONDS - time.monotonic()))[0]:
            try:
                written += os.read(ours, 1 << 16)
            # The last process that had the terminal open has ended (Linux gives EIO then).
            except OSError:
                process.wait(LIMIT_SECONDS)
                break
            if not is_pressed and interrupt_at is not None and interrupt_at(written.decode(errors="replace")):
                os.write(ours, _CTRL_C)
                is_pressed = True
        else:
            raise AssertionError(f"tightfit {' '.join(words)} did not end: {written[-500:].decode(errors='replace')}")
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    raw = written.decode()
    return Shown(exit_code=process.returncode, lines=_left_on(raw), seconds=time.monotonic() - started, raw=raw)


def _left_on(raw: str) -> tuple[str, ...]:
    """The lines that are not empty, after carriage returns and erasures."""
    lines = (
        _COLOURS.sub("", line.rpartition("\r\x1b[K")[2]).rstrip() for line in raw.replace("\r\n", "\n").split("\n")
    )
    return tuple(line for line in lines if line)
