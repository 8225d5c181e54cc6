"""The processes that workloads are traced in: fresh ones, or on Linux forks of one that has imported torch already.

That one is started with the first capture and kept for the next. It has the environment and the folder of this process; when those change it is
replaced. Wherever forking does not work a fresh process does, so callers see no difference but the time.
"""

import atexit
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from tightfit.capture.serving import CANNOT_FORK, ONE_THREAD

_PROGRAM = (sys.executable, "-m", "tightfit.capture.child")
Meanwhile = Callable[[], None]


def run_child(request: Path, *, show_output: bool, meanwhile: Meanwhile | None) -> tuple[int, bytes]:
    """Runs the child on a request, and `meanwhile` besides; the exit code (negative: a signal), and what it said where nobody could see it."""
    # Where there is a card, it is hidden: the virtual one is the same everywhere, and no context is made on the real one.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    is_seen = sys.stderr.isatty() or show_output
    if not show_output:  # what the libraries say when they are imported is output, too
        done = _in_fork(request, environment, is_seen=is_seen, meanwhile=meanwhile)
        if done is not None:
            return done
    return _in_fresh_process(request, environment, is_seen=is_seen, meanwhile=meanwhile)


def _in_fresh_process(
    request: Path, environment: Mapping[str, str], *, is_seen: bool, meanwhile: Meanwhile | None
) -> tuple[int, bytes]:
    with subprocess.Popen(
        [*_PROGRAM, str(request)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stderr=None if is_seen else subprocess.PIPE,
    ) as child:
        if meanwhile is not None:
            meanwhile()
        said = child.communicate()[1] or b""
    return child.returncode, said


def _in_fork(
    request: Path, environment: Mapping[str, str], *, is_seen: bool, meanwhile: Meanwhile | None
) -> tuple[int, bytes] | None:
    """As in a fresh process; None where there is nothing to fork from, and then `meanwhile` has not run."""
    origin = _origins.get(environment)
    if origin is None:
        return None
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here:
        with there:
            reader, writer = (None, os.dup(2)) if is_seen else os.pipe()
            try:
                origin.ask(request, there, writer)
            except OSError:
                pass  # it has just ended; what it was to answer on is closed below, and says so
            finally:
                os.close(writer)
        if meanwhile is not None:
            meanwhile()
        said = b""
        if reader is not None:
            with open(reader, "rb") as pipe:
                said = pipe.read()
        code = here.recv(64)
    if code:
        return int(code), said
    _origins.give_up(origin)
    return _in_fresh_process(request, environment, is_seen=is_seen, meanwhile=None)


class _Origin:
    """The process that is forked."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        kept = {f"TIGHTFIT_{ONE_THREAD}": environment[ONE_THREAD]} if ONE_THREAD in environment else {}
        with theirs:
            self._process = subprocess.Popen(
                [*_PROGRAM, "--serve", str(theirs.fileno())],
                env={**environment, **kept, ONE_THREAD: "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def ask(self, request: Path, reply: socket.socket, errors: int) -> None:
        """Asks for a capture.

        Raises:
            OSError: it has ended.
        """
        socket.send_fds(self._control, [os.fsencode(request)], [reply.fileno(), errors])

    def dismiss(self) -> None:
        """Nobody will ask again: it ends with its last capture, which is now if there is none."""
        self._control.close()

    def wait(self) -> int:
        """Waits for its end, and returns its exit code."""
        self._control.close()
        return self._process.wait()


class _Origins:
    """The one origin there is, made when it is wanted; one for each process, should this one be forked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_possible = hasattr(os, "pidfd_open")
        self._made_for: tuple[int, str, Mapping[str, str]] | None = None
        self._origin: _Origin | None = None
        self._dismissed: list[_Origin] = []

    def get(self, environment: Mapping[str, str]) -> _Origin | None:
        """An origin with this environment."""
        with self._lock:
            wanted = (os.getpid(), os.getcwd(), dict(environment))
            if self._is_possible and self._made_for != wanted:
                if self._origin is not None:
                    self._origin.dismiss()
                    self._dismissed.append(self._origin)
                self._origin, self._made_for = _Origin(environment), wanted
            return self._origin if self._is_possible else None

    def give_up(self, origin: _Origin) -> None:
        """It did not answer. The next capture tries another, unless this one has said that it cannot fork."""
        with self._lock:
            if origin.wait() == CANNOT_FORK:
                self._is_possible = False
            if origin is self._origin:
                self._origin = self._made_for = None

    def end(self) -> None:
        """Called when this process ends, and not when a fork of it does, which has none of its own to wait for."""
        if self._made_for is not None and self._made_for[0] == os.getpid():
            for origin in filter(None, (*self._dismissed, self._origin)):
                origin.wait()


_origins = _Origins()
atexit.register(_origins.end)
