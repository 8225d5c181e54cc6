"""Child processes that do one thing and never outlive their parent, however it ends.

The parent kills them when it is interrupted or terminated, and removes the folder that it shares with them. If it is killed itself, Linux
kills them; elsewhere a thread in them sees that the other end of their standard input was closed.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG = 1  # sys/prctl.h
_IS_LINUX = sys.platform == "linux"
_ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class _ToldToEnd(BaseException):
    """A terminating signal has arrived: open contexts are left first."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder to share with a child. It is removed when the block is left, also if a signal ends this process meanwhile."""
    with _signals_close_first(), tempfile.TemporaryDirectory(prefix="tightfit-") as folder:
        yield Path(folder)


@contextlib.contextmanager
def _signals_close_first() -> Iterator[None]:
    """Signals without a handler end this process as usual, but only after the contexts inside of the block were left."""
    # Python allows only the main thread to set signal handlers. A handler that the program has set is the
    # program's decision.
    is_main = threading.current_thread() is threading.main_thread()
    unhandled = [number for number in _ENDING if is_main and signal.getsignal(number) is signal.SIG_DFL]

    def told(number: int, _frame: FrameType | None) -> None:
        raise _ToldToEnd(number)

    ended = None
    try:
        for number in unhandled:
            signal.signal(number, told)
        yield
    except _ToldToEnd as error:
        ended = error.number
    finally:
        for number in unhandled:
            signal.signal(number, signal.SIG_DFL)
    if ended is not None:
        # With the default handler again: the shell sees that the process was ended by the signal.
        signal.raise_signal(ended)


@contextlib.contextmanager
def child(
    module: str, request: Path, *, environment: Mapping[str, str] | None = None, reads_errors: bool
) -> Iterator["subprocess.Popen[bytes]"]:
    """The process `python -m module REQUEST`, which calls `die_with_parent` first. It is killed, with its own children, when the block is left.

    With `reads_errors` its stderr is a pipe, to be read; else it is ours.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", module, str(request), str(os.getpid())],
        env=environment,
        stdin=subprocess.DEVNULL if _IS_LINUX else subprocess.PIPE,
        stderr=subprocess.PIPE if reads_errors else None,
        # A group of its own, so that data loader workers and other children of the program can be killed with
        # it.
        process_group=None if sys.platform == "win32" else 0,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            if sys.platform == "win32":
                process.kill()
            else:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for pipe in (process.stdin, process.stderr):
            if pipe is not None:
                pipe.close()


def die_with_parent(parent: int) -> None:
    """To be called first by a child: from then on it ends when `parent`, the process that started it, ends."""
    if _IS_LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The parent ended before the call: there will be no signal.
        if os.getppid() != parent:
            os._exit(1)
        return
    lifeline = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    threading.Thread(target=_watch, args=(lifeline,), daemon=True, name="tightfit-lifeline").start()


def _watch(lifeline: int) -> None:
    """Ends this process when the other end of `lifeline` has been closed."""
    os.read(lifeline, 1)
    os._exit(1)
