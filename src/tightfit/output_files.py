"""Files that users ask for: tried before the work, and written whole or not at all.

The content goes to a new file in the same folder, which then takes the name: a reader never finds half a file, and the old one stays if the disk
is full. What is no regular file (`/dev/stdout`, a pipe) is written as it is, as it cannot be replaced.
"""

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from tightfit.errors import OutputError, UsageError

PathLike = str | os.PathLike[str]
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)


def check_outputs(files: Mapping[str, PathLike | None], *, inputs: Iterable[PathLike | None] = ()) -> None:
    """Checks that each file can be written, before work that may take minutes. `files` maps options, for the message, to paths.

    `inputs` are files that the command reads; what does not exist is ignored, and so is the function of `FILE.py:FUNCTION`.

    Raises:
        UsageError: a folder is missing or takes no new files, a path is a folder or may not be written, or is that of an input or of another output.
    """
    given = {option: Path(path) for option, path in files.items() if path is not None}
    read = [Path(found) for each in inputs if each is not None for found in (each, os.fspath(each).rpartition(":")[0])]
    for option, path in given.items():
        try:
            _check(path)
        except OSError as error:
            raise UsageError(f"{option} {path}: {_reason(error, path)}") from None
        if _is_regular(path) and any(_is_same(path, other) for other in read):
            raise UsageError(f"{option} {path}: this file is an input, and would be overwritten; name another one")
        for other_option, other in given.items():
            if other_option != option and _target(other) == _target(path) and _is_regular(path, if_new=True):
                raise UsageError(f"{option} {path}: {other_option} writes the same file; name two")


@contextlib.contextmanager
def writing(path: PathLike) -> Iterator[BinaryIO]:
    """A file to write to, which takes the name `path` at the end of the block. After an exception the file at `path` is what it was.

    Raises:
        OutputError: it cannot be written. The message says why.
    """
    target = _target(path)
    try:
        if not _is_regular(target, if_new=True):
            with open(target, "wb") as file:
                yield file
            return
        partial = _beside(target)
        descriptor = os.open(partial, _NEW, 0o666)
        try:
            with open(descriptor, "wb") as file:
                if target.exists():
                    os.chmod(partial, stat.S_IMODE(target.stat().st_mode))
                yield file
            os.replace(partial, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"{os.fspath(path)} cannot be written: {_reason(error, Path(path))}") from error


def write_text(path: PathLike, text: str) -> None:
    """Writes `text` as UTF-8, as `writing` does.

    Raises:
        OutputError: it cannot be written.
    """
    with writing(path) as file:
        file.write(text.encode())


def _check(path: Path) -> None:
    target = _target(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {target.parent if path.is_symlink() else path.parent}")
    if target.is_dir():
        raise IsADirectoryError("this is a folder; name a file in it")
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError("the file may not be written")
    if _is_regular(target, if_new=True):
        # Only a file that is made shows it: permissions do not tell of file systems that are read-only or full.
        partial = _beside(target)
        os.close(os.open(partial, _NEW, 0o666))
        os.unlink(partial)


def _target(path: PathLike) -> Path:
    # What a link leads to is written, and the link stays.
    return Path(os.path.realpath(path))


def _beside(target: Path) -> Path:
    # Not made from the file's name, which may be as long as names can be.
    return target.parent / f".tightfit-{os.urandom(6).hex()}.partial"


def _is_regular(path: Path, *, if_new: bool = False) -> bool:
    """Whether `path` is a regular file, or one that can be replaced (`if_new`: or nothing yet)."""
    return path.is_file() or (if_new and not path.exists())


def _is_same(path: Path, other: Path) -> bool:
    return other.is_file() and os.path.samefile(path, other)


def _reason(error: OSError, path: Path) -> str:
    if error.strerror is None:
        return str(error)
    where = f" in the folder {path.parent}" if isinstance(error, PermissionError) else ""
    return f"{error.strerror}{where}"
