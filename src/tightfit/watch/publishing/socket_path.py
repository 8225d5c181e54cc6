"""Where the agent listens for programs: a Unix socket of the machine's (root's agent), or of one user's."""

import os
import stat
from pathlib import Path

VARIABLE = "TIGHTFIT_WATCH_SOCKET"
_OF_THE_MACHINE = Path("/run/tightfit/watch.sock")


def listening_path() -> Path:
    """Where an agent of this user listens."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given)
    return _OF_THE_MACHINE if os.geteuid() == 0 else _of_the_user()


def sending_paths() -> list[Path]:
    """Where a program of this user sends to: each agent that may be there."""
    given = os.environ.get(VARIABLE)
    if given:
        return [Path(given)]
    return [_OF_THE_MACHINE, *([] if os.geteuid() == 0 else [_of_the_user()])]


def make_folder(path: Path) -> None:
    """Makes the folder of a socket: root's for all users, another one's for that user alone.

    Raises:
        OSError: it cannot be made, or belongs to somebody else.
    """
    path.parent.mkdir(mode=0o755 if os.geteuid() == 0 else 0o700, parents=True, exist_ok=True)
    found = os.lstat(path.parent)
    # In /tmp anybody may have made it before us.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{path.parent} belongs to another user")


def _of_the_user() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return (Path(runtime) / "tightfit" if runtime else Path(f"/tmp/tightfit-{os.geteuid()}")) / "watch.sock"
