"""What a traced program has written, seen from outside when it is over."""

import os
import stat
from pathlib import Path

from tightfit.capture.processes.containment.policy import COPIED, DROPPED, UPPER

_FOLDER = "folder"
_MAX_NAMED = 3


def remember(place: Path, folder: str) -> None:
    """`folder` is what the files written at `place` were written to, as the program saw it."""
    (place / _FOLDER).write_text(folder)


def written_files(shared: Path) -> list[str]:
    """The paths of the files that the program wrote, as it saw them; compiled Python is not counted."""
    found = []
    covered = sorted((shared / DROPPED).iterdir() if (shared / DROPPED).is_dir() else ())
    for place in (*covered, shared / COPIED):
        if not (place / _FOLDER).exists():
            continue
        folder = (place / _FOLDER).read_text()
        for parent, _, names in os.walk(place / UPPER):
            if os.path.basename(parent) != "__pycache__":
                inside = os.path.relpath(parent, place / UPPER)
                found += [
                    os.path.normpath(os.path.join(folder, inside, name))
                    for name in names
                    if _is_file(f"{parent}/{name}")
                ]
    return sorted(found)


def _is_file(path: str) -> bool:
    # Others mark what the program has removed.
    return stat.S_ISREG(os.lstat(path).st_mode)


def dropped_notes(shared: Path) -> list[tuple[str, str]]:
    """Where and what, as the assumptions of an estimate have it; nothing where the program wrote nothing."""
    files = written_files(shared)
    if not files:
        return []
    named = ", ".join(os.path.relpath(file) if _is_near(file) else file for file in files[:_MAX_NAMED])
    more = f" and {len(files) - _MAX_NAMED} more" if len(files) > _MAX_NAMED else ""
    were, them = f"{len(files)} files that the program wrote were", "them"
    if len(files) == 1:
        were, them = "1 file that the program wrote was", "it"
    return [("", f"{were} dropped after the trace: {named}{more}; --allow-writes makes {them} real")]


def _is_near(file: str) -> bool:
    return file.startswith(os.getcwd() + os.sep)
