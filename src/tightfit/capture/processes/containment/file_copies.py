"""Copies of the files that a program writes, in Python: where the kernel keeps no overlay, its functions for files are led to them.

A path is led to its copy if there is one; writing makes one, of what was there. What was removed is remembered. All other paths stay as they are.
"""

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# As the kernel has it.
_MOST_LINKS = 40
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class OwnCalls:
    """The calls of this thread that are our own: they are not led anywhere."""

    def __init__(self) -> None:
        self._own = threading.local()

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Calls from within are our own."""
        before = self.is_asking
        self._own.is_asking = True
        try:
            yield
        finally:
            self._own.is_asking = before

    @property
    def is_asking(self) -> bool:
        """Whether this thread is within `asking`."""
        return getattr(self._own, "is_asking", False)


class FileCopies:
    """The copies, below `root`. `real` are the folders whose files are written for real."""

    def __init__(self, root: Path, real: tuple[str, ...]) -> None:
        self._root = str(root)
        self._real = real
        self._removed: set[str] = set()
        self.has_links = False
        """Whether a copy may be a link, which leads to what the program sees there."""
        self.own_calls = OwnCalls()

    def place(self, path: Any, *, is_followed: bool = False) -> str | None:
        """The path that a program means, without links on the way to it, and to what a link there leads where it `is_followed`; None for what is no path of a file, or is written for real."""
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        absolute = os.path.abspath(os.fsdecode(path))
        found = os.path.join(_without_links(self, os.path.dirname(absolute)), os.path.basename(absolute))
        if is_followed and os.path.islink(self.seen(found)):
            found = _without_links(self, found)
        is_real = any(p == real or p.startswith(f"{real}/") for real in self._real for p in (found, absolute))
        return None if is_real else found

    def copy_of(self, place: str) -> str:
        """Where its copy is, or would be."""
        return self._root + place

    def is_removed(self, place: str) -> bool:
        """Whether the program has removed it, or a folder that it is in."""
        return any(str(p) in self._removed for p in (Path(place), *Path(place).parents))

    def seen(self, place: str) -> str:
        """What the program reads: the copy, or the file itself; a path where nothing is if it was removed."""
        copy = self.copy_of(place)
        return copy if os.path.lexists(copy) or self.is_removed(place) else place

    def written(self, place: str, *, with_content: bool = True) -> str:
        """The copy to write to, made of what is there."""
        copy, source = self.copy_of(place), self.seen(place)
        parent = self.seen(os.path.dirname(place))
        if os.path.isdir(parent):
            os.makedirs(os.path.dirname(copy), exist_ok=True)
        if source != copy and os.path.lexists(source):
            if os.path.islink(source):
                if with_content:
                    os.symlink(os.readlink(source), copy)
                    self.has_links = True
            elif os.path.isdir(source):
                os.makedirs(copy, exist_ok=True)
            elif not os.access(source, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), place)
            elif with_content:
                shutil.copy2(source, copy)
        return copy

    def names(self, place: str) -> list[str]:
        """The entries of a folder, as the program sees it.

        Raises:
            OSError: there is no such folder.
        """
        copy, found = self.copy_of(place), dict[str, None]()
        if not self.is_removed(place) and os.path.isdir(place):
            found = dict.fromkeys(n for n in os.listdir(place) if os.path.join(place, n) not in self._removed)
        if os.path.isdir(copy) or not found:
            found |= dict.fromkeys(
                os.listdir(self.seen(place)) if os.path.isdir(self.seen(place)) else os.listdir(copy)
            )
        return [name for name in found if self._is_there(os.path.join(place, name))]

    def _is_there(self, place: str) -> bool:
        return os.path.lexists(self.seen(place))

    def remove(self, place: str, remove: Callable[[str], None]) -> None:
        """Removes a file, or an empty folder, with `remove`.

        Raises:
            OSError: there is no such file.
        """
        seen = self.seen(place)
        if os.path.isdir(seen) and not os.path.islink(seen) and self.names(place):
            if remove is os.rmdir or remove.__name__ == "rmdir":
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), place)
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), place)
        copy = self.copy_of(place)
        if os.path.lexists(copy):
            remove(copy)
        elif not self._is_there(place):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), place)
        if os.path.lexists(place):
            self._removed.add(place)

    def make_folder(self, place: str, mode: int) -> None:
        """As `os.mkdir`.

        Raises:
            OSError: it is there, or what it is to be in is not.
        """
        if self._is_there(place):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), place)
        os.mkdir(self.written(place), mode)

    def rename(self, source: str, target: str) -> None:
        """As `os.replace`.

        Raises:
            OSError: there is no such file.
        """
        if not self._is_there(source):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
        copy = _whole(self, source)
        goal = self.written(target, with_content=False)
        os.replace(copy, goal)
        for place in (source, target):
            if os.path.lexists(place):
                self._removed.add(place)


def _whole(copies: FileCopies, place: str) -> str:
    """The copy of a file, or of a folder with all that is in it."""
    copy = copies.written(place)
    if os.path.isdir(copy) and not os.path.islink(copy):
        for name in copies.names(place):
            _whole(copies, os.path.join(place, name))
    return copy


def make_link(copies: FileCopies, target: Any, place: str) -> None:
    """As `os.symlink`.

    Raises:
        OSError: something is there.
    """
    if os.path.lexists(copies.seen(place)):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), place)
    os.symlink(target, copies.written(place, with_content=False))
    copies.has_links = True


def _without_links(copies: FileCopies, path: str) -> str:
    """As `os.path.realpath`, with the links that the program sees."""
    if not copies.has_links:
        return os.path.realpath(path)
    found, rest, num_links = "/", list(reversed(Path(path).parts[1:])), 0
    while rest:
        place = os.path.join(found, rest.pop())
        if num_links < _MOST_LINKS and os.path.islink(seen := copies.seen(place)):
            num_links += 1
            target = os.path.normpath(os.path.join(found, os.readlink(seen)))
            rest += reversed(Path(target).parts[1:])
            found = "/"
        else:
            found = place
    return found
