"""A real terminal for tests: tmux, whose screen can be read, resized and typed into."""

import contextlib
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


class Terminal:
    """One terminal with a shell."""

    def __init__(self, socket: Path) -> None:
        self._socket = str(socket)

    def tmux(self, *words: str) -> str:
        """A command of tmux."""
        program = ["tmux", "-S", self._socket, "-f", "/dev/null", *words]
        return subprocess.run(program, capture_output=True, text=True, check=True, timeout=60).stdout

    def type(self, *keys: str) -> None:
        """Presses keys, by the names that tmux has for them."""
        self.tmux("send-keys", "-t", "0", *keys)

    def resize(self, width: int, height: int) -> None:
        """Makes the terminal as large as this."""
        self.tmux("resize-window", "-t", "0", "-x", str(width), "-y", str(height))

    def screen(self, *, escapes: bool = False) -> str:
        """What the terminal shows; with the escape sequences of colours and styles if they are asked for."""
        return self.tmux("capture-pane", "-p", *(["-e"] if escapes else []), "-t", "0")

    def wait_for(self, words: str, *, gone: bool = False, seconds: float = 90.0) -> str:
        """Waits until the terminal shows words, or no longer does."""
        deadline = time.monotonic() + seconds
        while (words in (text := self.screen())) == gone:
            assert time.monotonic() < deadline, f"{'still' if gone else 'never'} {words!r} on\n{text}"
            time.sleep(0.1)
        return text


@contextlib.contextmanager
def terminal(folder: Path, *, width: int = 80, height: int = 24, **environment: str) -> Iterator[Terminal]:
    """A terminal with a plain shell; the test is skipped where tmux is not installed."""
    if shutil.which("tmux") is None:
        pytest.skip("needs tmux (Debian: apt-get install tmux)")
    found = Terminal(folder / "tmux")
    said = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())
    clean = f"env -u NO_COLOR -u COLUMNS -u LINES LC_ALL=C.UTF-8 PS1='$ ' {said} sh"
    size = ("-x", str(width), "-y", str(height))
    found.tmux("new-session", "-d", *size, "-c", os.getcwd(), clean)
    try:
        yield found
    finally:
        found.tmux("kill-server")
