"""What ranks other than the first write: they see it, and it is dropped. What the first one writes is the run's.

Python's functions for files are led to copies (`capture.processes.containment.redirection`), and what cannot be led is refused. A file that the first rank
has made is not there for the others before they have made it too: they come later or earlier to the same line, and are to take the same way.
"""

import contextlib
import functools
import os
import sys
from pathlib import Path
from typing import Any

from tightfit.capture.processes.containment import redirection
from tightfit.capture.processes.containment.file_copies import WRITES, FileCopies
from tightfit.capture.processes.containment.library_saves import before_saves, lead_saves
from tightfit.capture.processes.containment.policy import DROPPED, Containment, Policy

_MADE = "made"
_OF_PATHS = {"os.mkdir": 0, "os.rename": 1, "os.link": 1, "os.symlink": 1, "sqlite3.connect": 0}


def note_made(folder: Path) -> None:
    """For the first rank: what it makes is noted in a file of `folder` before it is there."""
    out = os.open(folder / _MADE, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    known: set[str] = set()

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            is_written = (isinstance(flags, int) and flags & WRITES) or (
                isinstance(mode, str) and set(mode) & set("wax+")
            )
            if not is_written:
                return
        elif event in _OF_PATHS:
            path = arguments[_OF_PATHS[event]]
        else:
            return
        _note(out, known, path)

    sys.addaudithook(look)
    before_saves(lambda path: _note(out, known, path))


def _note(out: int, known: set[str], path: Any) -> None:
    if not isinstance(path, str | bytes | os.PathLike):
        return
    with contextlib.suppress(OSError, ValueError):
        place = _place(os.fsdecode(path))
        if place not in known and not os.path.lexists(place):
            known.add(place)
            os.write(out, f"{place}\n".encode(errors="surrogateescape"))


def _place(path: str) -> str:
    absolute = os.path.abspath(path)
    return os.path.join(os.path.realpath(os.path.dirname(absolute)), os.path.basename(absolute))


class CopiesOfRank(FileCopies):
    """Copies of what this rank writes, beside files as they are without what the first rank has made."""

    def __init__(self, root: Path, real: tuple[str, ...], made: Path) -> None:
        super().__init__(root, real)
        self._file = made
        self._length = 0
        self._made: set[str] = set()

    def is_removed(self, place: str) -> bool:
        """Whether the program has removed it, or the first rank has made it."""
        return super().is_removed(place) or self._is_made(place)

    def _is_made(self, place: str) -> bool:
        with self.own_calls.asking(), contextlib.suppress(OSError):
            if (size := os.stat(self._file).st_size) > self._length:
                text = self._file.read_bytes()
                # A line that is being written is read the next time.
                self._length = text.rfind(b"\n") + 1 if len(text) >= size else 0
                self._made.update(text[: self._length].decode(errors="surrogateescape").splitlines())
        return any(str(each) in self._made for each in (Path(place), *Path(place).parents))

    def names(self, place: str) -> list[str]:
        """The entries of a folder, without those that the first rank has made."""
        found = super().names(place)
        return [name for name in found if os.path.lexists(self.seen(os.path.join(place, name)))]


def drop_writes(folder: Path, rank: int) -> None:
    """For the other ranks: what this one writes is dropped, from now on."""
    own = folder / f"rank{rank}"
    (own / DROPPED).mkdir(parents=True)
    made = folder / _MADE
    copies = redirection.begin(
        Containment(policy=Policy(allow_network=True), shared=str(own)),
        copies=functools.partial(CopiesOfRank, made=made),
        why="ranks other than the first write nothing",
    )
    lead_saves(lambda path: redirection.led_path(copies, path))
