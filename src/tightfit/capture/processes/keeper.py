"""Between the process that asks for traces and the server that forks them: it ends the server, all that this has started, and removes their folder
when the one that asked ends, whatever ended it.

Where the kernel allows it the server is process 1 of a namespace: with it go all its descendants. Elsewhere orphans come to the keeper, which
ends them.
"""

import contextlib
import os
import select
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

from tightfit.capture.processes.containment import linux, namespaces
from tightfit.capture.processes.containment.policy import NAMESPACES, forced_mechanism

_MAX_BYTES = 1 << 16
_TO_END = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))


class Kept:
    """In the server: what it is to do around each child, and how the keeper knows of it."""

    def __init__(self, keeper: int) -> None:
        self._keeper = keeper
        # If the keeper has ended before it could be told of, this raises.
        os.write(keeper, b"\n")
        self.cell = namespaces.ProcessSpace() if os.getpid() == 1 else None

    @contextlib.contextmanager
    def child_in(self, folder: str) -> Iterator[None]:
        """A child that is forked in the block is closed in; its processes are gone when the block is left. `folder` is removed if the asking process ends."""
        os.write(self._keeper, f"{folder}\n".encode())
        if self.cell is not None:
            self.cell.open()
        try:
            yield
        finally:
            if self.cell is not None:
                self.cell.close()
            else:
                end_descendants()
            os.write(self._keeper, b"\n")

    def leave(self) -> None:
        """In a child: the keeper waits for the end of the server alone."""
        os.close(self._keeper)


def keep() -> Kept:
    """Becomes the keeper; returns in the server alone, a child of it."""
    reads, writes = os.pipe()
    has_space = forced_mechanism() in (None, NAMESPACES) and namespaces.found_space()
    linux.adopt_orphans()
    pid = os.fork()
    if pid == 0:
        os.close(reads)
        # The signal reaches process 1 of a namespace too, as it comes from outside.
        linux.signal_at_parents_end(signal.SIGKILL)
        if not has_space:
            linux.adopt_orphans()
        return Kept(writes)
    os.close(writes)
    _wait_for(pid, reads)
    os._exit(0)


def _wait_for(server: int, reads: int) -> None:
    """Until the server ends, or this process is told to; then nothing is left."""
    # A handler that raises would do so wherever it is: past the wait too, or before a folder is read that was told in time.
    wakes, woken = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(reads, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    for number in _TO_END:
        signal.signal(number, lambda *_: None)
    linux.signal_at_parents_end(signal.SIGTERM)
    folder, is_open = b"", True
    while is_open and wakes not in select.select([reads, wakes], [], [])[0]:
        folder, is_open = _latest(reads, folder)
    with contextlib.suppress(ProcessLookupError):
        os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
    end_descendants()
    folder, _ = _latest(reads, folder)
    if folder:
        _remove(os.fsdecode(folder))


def _latest(reads: int, folder: bytes) -> tuple[bytes, bool]:
    """The last line that can be read now, or `folder`, and whether there may be more."""
    while True:
        try:
            said = os.read(reads, _MAX_BYTES)
        except BlockingIOError:
            return folder, True
        if not said:
            return folder, False
        # Lines are written whole.
        folder = said.split(b"\n")[-2]


def _remove(folder: str) -> None:
    for parent, folders, _ in os.walk(folder):
        for name in folders:
            # The kernel makes folders for overlays that nobody may look into.
            with contextlib.suppress(OSError):
                if not os.path.islink(path := os.path.join(parent, name)):
                    os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


def end_descendants() -> None:
    """Ends all children of this process, and theirs, which become its own as it adopts orphans."""
    while children := _children():
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


def _children() -> list[int]:
    own = str(os.getpid())
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # The name may have blanks and brackets in it.
            if (entry / "stat").read_text().rpartition(")")[2].split()[1] == own:
                found.append(int(entry.name))
    return found
