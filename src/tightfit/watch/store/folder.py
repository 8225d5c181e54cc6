"""Where a history is, and the lock that makes one agent its writer."""

import fcntl
import os
from pathlib import Path

from tightfit.errors import WatchError

_FILE, _LOCK = "history.sqlite", "agent.lock"
_OF_THE_MACHINE = Path("/var/lib/tightfit/watch")


class StoreFolder:
    """A folder with one history. Of all processes one can hold its lock, and writes; the kernel takes the lock back however that process ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    @property
    def database(self) -> Path:
        """The file of the history."""
        return self.path / _FILE

    def lock(self) -> bool:
        """Makes the folder where there is none, and takes the lock; False if another process has it.

        Raises:
            WatchError: the folder cannot be made or written.
        """
        if self._lock is not None:
            return True
        try:
            # Command lines are in it: one's own is for oneself, that of the machine shows what /proc shows.
            self.path.mkdir(mode=0o755 if self.path == _OF_THE_MACHINE else 0o700, parents=True, exist_ok=True)
            descriptor = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise WatchError(
                f"{self.path}: the history cannot be written: {error.strerror}; name another folder with --store"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        self._lock = descriptor
        return True

    def is_locked(self) -> bool:
        """Whether another process has the lock."""
        try:
            descriptor = os.open(self.path / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def holder(self) -> int | None:
        """The PID of the agent that has, or last had, the lock."""
        try:
            return int((self.path / _LOCK).read_text())
        except (OSError, ValueError):
            return None

    def unlock(self) -> None:
        """Gives the lock back."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def usual_folder() -> Path:
    """That of the machine, for root and for whoever may read the history there; else one in the user's own folder for states."""
    if os.geteuid() == 0 or os.access(_OF_THE_MACHINE / _FILE, os.R_OK):
        return _OF_THE_MACHINE
    states = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(states) / "tightfit" / "watch"
