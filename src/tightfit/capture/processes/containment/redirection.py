"""Keeps a program from writing where the kernel allows no namespaces: Python's functions for files go to copies (`copies`), the rest is refused.

What is refused is so by the kernel (Landlock) where that can be, else by an audit hook, which sees what goes through Python alone.
"""

import builtins
import errno
import functools
import io
import multiprocessing.util
import os
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tightfit.capture.processes.containment import landlock
from tightfit.capture.processes.containment.file_copies import WRITES, FileCopies, make_link
from tightfit.capture.processes.containment.policy import (
    DROPPED,
    LANDLOCK,
    PYTHON,
    UPPER,
    Containment,
    forced_mechanism,
)
from tightfit.capture.processes.containment.written import remember
from tightfit.capture.replace import replace
from tightfit.errors.faults import for_torch

_READ = frozenset(("stat", "lstat", "access", "readlink", "statvfs", "chdir", "listxattr", "getxattr"))
# What is asked of a link itself.
_OF_LINKS = frozenset(("lstat", "readlink"))
_CHANGED = frozenset(("chmod", "utime", "truncate", "chown", "setxattr", "removexattr"))
# Events of writing, with the positions of their paths.
_EVENTS = {
    **dict.fromkeys(("os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.chown", "os.utime"), (0,)),
    **dict.fromkeys(("os.rename", "os.link"), (0, 1)),
    **dict.fromkeys(("os.setxattr", "os.removexattr", "sqlite3.connect"), (0,)),
    "os.symlink": (1,),
}
# Modules of Python's that keep its function under a name of their own.
_HAVE_OPEN = ("tarfile", "bz2")
_PROGRAMS = ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec")
_ended: list[bool] = []
_unseen: list[bool] = []
_whys: list[str] = []


def begin(
    containment: Containment, *, copies: Callable[[Path, tuple[str, ...]], FileCopies] = FileCopies, why: str = ""
) -> FileCopies:
    """From now on, for the rest of the process. `copies` makes the table of what is written, which is returned; `why` is said in errors, by default that the program is traced."""
    if why:
        _whys.append(why)
    place = Path(containment.shared) / DROPPED / "files"
    # A short name: those of sockets in it may have about 100 characters.
    temporary = Path(containment.shared) / "t"
    (place / UPPER).mkdir(parents=True)
    temporary.mkdir()
    remember(place, "/")
    # Files for a moment are made where they are dropped, by whichever library.
    os.environ["TMPDIR"] = str(temporary)
    tempfile.tempdir = None
    sys.dont_write_bytecode = True
    copied = copies(place / UPPER, (os.path.realpath(containment.shared), containment.shared, "/dev", "/proc", "/sys"))
    replace_functions(copied)
    mechanism = forced_mechanism()
    is_by_kernel = mechanism != PYTHON and landlock.restrict(os.path.realpath(containment.shared))
    assert is_by_kernel or mechanism != LANDLOCK, "no Landlock here"
    if not is_by_kernel:
        _unseen.append(True)
        multiprocessing.util.spawnv_passfds = _spawning(multiprocessing.util.spawnv_passfds)
    sys.addaudithook(functools.partial(_refuse, copied, is_by_kernel))
    return copied


def end() -> None:
    """What comes later is ours."""
    _ended.append(True)


def notes() -> list[tuple[str, str]]:
    """Where and what, as the assumptions of an estimate have it."""
    if not _unseen:
        return []
    return [
        (
            "",
            "this system allows no way to keep libraries written in C from writing files; what Python wrote was dropped",
        )
    ]


def _refuse(copies: FileCopies, is_by_kernel: bool, event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open":
        path, mode, flags = arguments
        # Files that are opened by C code of Python's own have no flags.
        if (isinstance(flags, int) and flags & WRITES) or (isinstance(mode, str) and set(mode) & set("wax+")):
            _refuse_writing(copies, path)
    elif event in _EVENTS:
        for position in _EVENTS[event]:
            _refuse_writing(copies, arguments[position])
    elif event in _PROGRAMS and not is_by_kernel and not _ended:
        raise _error(
            os.fsdecode(arguments[0]), "cannot be run while the program is traced, as its writes could not be dropped"
        )


def _refuse_writing(copies: FileCopies, path: Any) -> None:
    if _ended or path in (":memory:", b":memory:", "") or isinstance(path, int):
        return
    with copies.own_calls.asking():
        place = copies.place(path)
    if place is not None:
        raise _error(place, "was not written, as this way of writing cannot be redirected while the program is traced")


def _error(path: str, what: str) -> OSError:
    if _whys:
        return for_torch(
            PermissionError(errno.EPERM, f"{path} {what.replace('while the program is traced', f'here: {_whys[0]}')}")
        )
    return for_torch(PermissionError(errno.EPERM, f"{path} {what} (--allow-writes lets it)"))


def _spawning(real: Callable[..., int]) -> Callable[..., int]:
    def spawn(path: Any, arguments: Any, descriptors: Any) -> int:
        # Python's own helper writes nothing.
        if not any(b"resource_tracker" in os.fsencode(each) for each in arguments):
            raise _error(
                "a process that multiprocessing spawns", "cannot be kept from writing while the program is traced"
            )
        return real(path, arguments, descriptors)

    return spawn


def replace_functions(copies: FileCopies) -> None:
    """Python's functions for files are led to the copies."""
    for name in _READ & vars(os).keys():
        _lead(copies, os, name, copies.seen)
    for name in _CHANGED & vars(os).keys():
        _lead(copies, os, name, copies.written)
    _lead(copies, sqlite3, "connect", copies.written)
    _lead(copies, sqlite3.dbapi2, "connect", copies.written)
    for name in ("remove", "unlink", "rmdir"):
        _answer(copies, name, _with_place(functools.partial(_remove, copies, getattr(os, name))))
    _answer(copies, "mkdir", _with_place(lambda place, mode=0o777: copies.make_folder(place, mode)))
    _answer(copies, "listdir", _with_place(copies.names), is_followed=True)
    _answer(copies, "scandir", functools.partial(_scan, copies), is_followed=True)
    for name in ("rename", "replace", "link", "symlink"):
        setattr(os, name, _of_two(copies, name, getattr(os, name)))
    real = builtins.open
    builtins.open = io.open = _opening(copies, real)
    # One that is imported later has ours.
    for module in [sys.modules[name] for name in _HAVE_OPEN if name in sys.modules]:
        for name in [name for name, value in vars(module).items() if value is real]:
            replace(module, **{name: builtins.open})
    os.open = _opening_descriptor(copies, os.open)
    # By descriptors of folders, it would pass us by.
    replace(shutil, _use_fd_functions=False)


def _lead(copies: FileCopies, owner: Any, name: str, to: Callable[[str], str]) -> None:
    """Replaces a function whose first argument is a path."""
    real = getattr(owner, name)

    @functools.wraps(real)
    def led(path: Any = ".", *arguments: Any, **options: Any) -> Any:
        found = _found(copies, path, options, to, is_followed=name not in _OF_LINKS)
        return real(path, *arguments, **options) if found is None else _named(path, found, real, *arguments, **options)

    setattr(owner, name, led)


def _found(
    copies: FileCopies, path: Any, options: dict[str, Any], to: Callable[[str], str], *, is_followed: bool = False
) -> str | None:
    if copies.own_calls.is_asking or _ended or options.get("dir_fd") is not None or path in (":memory:", ""):
        return None
    with copies.own_calls.asking():
        place = copies.place(path, is_followed=is_followed and options.get("follow_symlinks", True))
        return None if place is None else to(place)


def led_path(copies: FileCopies, path: Any) -> Any:
    """Where a file is that the program reads by what is no function of Python's."""
    found = _found(copies, path, {}, copies.seen, is_followed=True)
    return path if found is None else found


def _named(path: Any, found: str, real: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Calls `real` for a copy; an error names the path that the program gave."""
    try:
        return real(os.fsencode(found) if isinstance(path, bytes) else found, *arguments, **options)
    except OSError as error:
        error.filename = path
        raise


def _with_place(answer: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, place, *arguments, **options: answer(place, *arguments, **options)


def _answer(copies: FileCopies, name: str, answer: Callable[..., Any], *, is_followed: bool = False) -> None:
    """Replaces a function of `os` by one that gets the path as it was given, and the place."""
    real = getattr(os, name)

    @functools.wraps(real)
    def answered(path: Any = ".", *arguments: Any, dir_fd: int | None = None, **options: Any) -> Any:
        place = _found(copies, path, {"dir_fd": dir_fd}, lambda place: place, is_followed=is_followed)
        if place is None:
            return (
                real(path, *arguments, **options)
                if dir_fd is None
                else real(path, *arguments, dir_fd=dir_fd, **options)
            )
        with copies.own_calls.asking():
            return answer(path, place, *arguments, **options)

    setattr(os, name, answered)


def _remove(copies: FileCopies, real: Callable[[str], None], place: str) -> None:
    copies.remove(place, real)


class _Entry:
    """As `os.DirEntry`."""

    def __init__(self, folder: str, name: str) -> None:
        self.name = name
        self.path = os.path.join(folder, name)

    def __fspath__(self) -> str:
        return self.path

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isdir(self.path) and (follow_symlinks or not self.is_symlink())

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isfile(self.path) and (follow_symlinks or not self.is_symlink())

    def is_symlink(self) -> bool:
        return os.path.islink(self.path)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino


class _Entries(list[Any]):
    """As what `os.scandir` returns."""

    def __enter__(self) -> "_Entries":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.clear()

    def __iter__(self) -> Any:
        return iter(self[:])

    def __next__(self) -> Any:
        if not self:
            raise StopIteration
        return self.pop(0)


def _scan(copies: FileCopies, path: Any, place: str) -> Any:
    return _Entries(_Entry(os.fsdecode(path), name) for name in copies.names(place))


def _of_two(copies: FileCopies, name: str, real: Callable[..., None]) -> Callable[..., None]:
    def of_two(src: Any, dst: Any, *arguments: Any, **options: Any) -> None:
        source, target = (_found(copies, path, {}, lambda place: place) for path in (src, dst))
        if target is None and source is None:
            real(src, dst, *arguments, **options)
            return
        with copies.own_calls.asking():
            if name == "symlink":
                make_link(copies, src, target or dst)
            elif name == "link":
                real(copies.written(source or src), copies.written(target or dst, with_content=False))
            elif source is not None and target is not None:
                copies.rename(source, target)
            else:
                # Into or out of what is real: where it goes is dropped too.
                real(
                    copies.written(source) if source else src,
                    copies.written(target, with_content=False) if target else dst,
                )

    return functools.wraps(real)(of_two)


def _opening(copies: FileCopies, real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def opening(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        is_written = bool(set(mode) & set("wax+"))
        found = _found(
            copies,
            file,
            {},
            lambda place: _opened(copies, place, is_written, "w" in mode, "x" in mode),
            is_followed="x" not in mode,
        )
        return (
            real(file, mode, *arguments, **options)
            if found is None
            else _named(file, found, real, mode, *arguments, **options)
        )

    return opening


def _opening_descriptor(copies: FileCopies, real: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(real)
    def opening(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        is_new = flags & (os.O_CREAT | os.O_EXCL) == os.O_CREAT | os.O_EXCL
        found = _found(
            copies,
            path,
            {"dir_fd": dir_fd},
            lambda p: _opened(copies, p, bool(flags & WRITES), bool(flags & os.O_TRUNC), is_new),
            is_followed=not is_new and not flags & os.O_NOFOLLOW,
        )
        return real(path, flags, mode, dir_fd=dir_fd) if found is None else _named(path, found, real, flags, mode)

    return opening


def _opened(copies: FileCopies, place: str, is_written: bool, is_empty: bool, is_new: bool) -> str:
    if not is_written:
        return copies.seen(place)
    if is_new and os.path.lexists(copies.seen(place)):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), place)
    return copies.written(place, with_content=not is_empty)
