"""Tells bugs of tightfit from errors of the user's program, and reports a bug in one line, with a file for the traceback and exit code 4.

An exception is ours if it was raised in this package's own code, or in the standard library or numpy when our code called them. What torch raises
belongs to the program, also where our code forwarded the program's call, as in `function(*args, **kwargs)`; what our code raises in torch's place
is marked with `for_torch`. Where nothing but our own code runs (a technique's `options`, the solver, a report), every exception is ours:
`answering`.
"""

import contextlib
import functools
import opcode
import os
import platform
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import ParamSpec, TypeVar

from tightfit.errors import InternalError, TightfitError
from tightfit.errors.package_folders import package_folders

_FOLDER = str(Path(__file__).parents[1]) + os.sep
_STANDARD = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
# Packages that our code calls on its own account; exceptions raised in them under our frames are ours.
_OUR_TOOLS = ("numpy", "highspy", "rich", "cyclopts")
# CALL_FUNCTION_EX is the bytecode of f(*args, **kwargs), with which wrappers forward a call.
_CALL_WITH_GIVEN_ARGUMENTS = opcode.opmap["CALL_FUNCTION_EX"]
_MAX_WORDS = 200
_PREFIX = "tightfit-fault-"
MAX_FILES = 20
"""So many files with tracebacks are kept, the newest ones."""
_FOR_TORCH, _THEIRS = "_tightfit_for_torch", "_tightfit_theirs"

Error = TypeVar("Error", bound=BaseException)
Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")

# By code object: a traceback has frames and their code, not functions.
_handing_over: set[CodeType] = set()
_noted: list[InternalError] = []


def for_torch(error: Error) -> Error:
    """Marks an exception that our code raises where torch would raise it: `raise for_torch(RuntimeError(...))`."""
    setattr(error, _FOR_TORCH, True)
    return error


def hands_over(function: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
    """Marks a function that calls torch on behalf of the program and with its arguments: what is raised in its own frame counts as torch's."""
    _handing_over.add(function.__code__)  # type: ignore[attr-defined]
    return function


def theirs(callback: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
    """Wraps a callback of the user: what it raises is never counted as ours."""

    @functools.wraps(callback)
    def called(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
        try:
            return callback(*args, **kwargs)
        except Exception as error:
            setattr(error, _THEIRS, True)
            raise

    return called


def is_own_file(file: str) -> bool:
    """Whether `file` is one of this package's."""
    return file.startswith(_FOLDER)


def is_ours(error: BaseException) -> bool:
    """Whether an exception that is none of our own errors was raised by this package's code."""
    if not isinstance(error, Exception) or isinstance(error, TightfitError) or _is_nobodys(error):
        return False
    # Its traceback ends where the file was compiled; the file at fault is in the error itself.
    if isinstance(error, SyntaxError):
        return is_own_file(error.filename or "")
    innermost = next((code for code in reversed(_codes(error)) if not _is_tool(code.co_filename)), None)
    if innermost is None or not is_own_file(innermost.co_filename) or innermost in _handing_over:
        return False
    # A C function raises without a frame of its own, so the innermost Python frame is ours even where torch refused the arguments.
    return not _was_handed_on(error)


def _was_handed_on(error: BaseException) -> bool:
    """Whether the innermost frame was forwarding a call with `*args, **kwargs` to a C function, which has no frame of its own."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and last.tb_frame.f_code.co_code[last.tb_lasti] == _CALL_WITH_GIVEN_ARGUMENTS


def is_ours_below(error: BaseException) -> bool:
    """The same for an exception caught where the program calls us: from there on our code calls the program's only through torch.

    A function that replaces one of ours counts as ours.
    """
    outermost = next((c for c in _codes(error) if not is_own_file(c.co_filename) and not _is_tool(c.co_filename)), None)
    if outermost is None or outermost.co_filename.startswith(_folders_of("torch")):
        return is_ours(error)
    return isinstance(error, Exception) and not isinstance(error, TightfitError) and not _is_nobodys(error)


def _codes(error: BaseException) -> list[CodeType]:
    """The code objects of the traceback of `error`, from the outermost to the innermost frame."""
    return [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]


def _is_nobodys(error: Exception) -> bool:
    """Whether the place says nothing about the cause: the exception was marked, or stack or memory happened to run out there."""
    is_marked = hasattr(error, _FOR_TORCH) or hasattr(error, _THEIRS)
    return is_marked or isinstance(error, RecursionError | MemoryError) or type(error).__name__ == "OutOfMemoryError"


@functools.cache
def _folders_of(*packages: str) -> tuple[str, ...]:
    return tuple(folder + name + os.sep for folder in package_folders() for name in packages)


def _is_tool(file: str) -> bool:
    """Whether `file` is a library that acts for its caller: the standard library, our own tools, and code generated at run time."""
    if file.startswith(package_folders()):
        return file.startswith(_folders_of(*_OUR_TOOLS))
    # "<string>", "<frozen importlib._bootstrap>": generated code such as a dataclass's __init__ has no file.
    return not is_own_file(file) and file.startswith(("<", *_STANDARD))


def chain(error: BaseException) -> list[BaseException]:
    """`error` and its causes (`__cause__`, else `__context__`), down to the first."""
    found = [error]
    while True:
        last = found[-1]
        earlier = last.__cause__ if last.__cause__ is not None or last.__suppress_context__ else last.__context__
        if earlier is None or any(earlier is known for known in found):
            return found
        found.append(earlier)


def our_error(error: BaseException, during: str) -> TightfitError | None:
    """The first error of ours in the chain of `error`; None if all of it is the program's own."""
    for link in chain(error):
        if isinstance(link, TightfitError):
            return link
        if is_ours(link):
            return internal_error(link, during)
    return None


def internal_error(error: BaseException, during: str, *, technique: str = "") -> InternalError:
    """Turns an exception of our own code into a one-line error, and writes its traceback to a temporary file."""
    trace = "".join(traceback.format_exception(error))
    path = _write(trace, during)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(_FOLDER)]
    place = f" at tightfit/{frames[-1].filename.removeprefix(_FOLDER)}:{frames[-1].lineno}" if frames else ""
    said = " ".join(str(error).split())[:_MAX_WORDS]
    file = f"with the file {path}" if path else "with what --debug shows"
    found = InternalError(
        f"internal error in {during}: {type(error).__name__}{place}{': ' if said else ''}{said}; "
        f"this is a fault of tightfit, not of your program: please report it {file}",
        technique=technique,
        file=path,
    )
    found.trace = trace
    return found


def kept_file(error: TightfitError) -> TightfitError:
    """Writes the file of an internal error that another process has written where it is seen by nobody else."""
    if isinstance(error, InternalError) and error.file and error.trace and not os.path.exists(error.file):
        with contextlib.suppress(OSError), open(error.file, "w", encoding="utf-8") as file:
            file.write(error.trace)
        _drop_oldest(Path(error.file).parent)
    return error


def _write(trace: str, during: str) -> str:
    from tightfit import __version__

    # Not imported for this: most processes of tightfit run without torch, and its import may be what failed.
    torch = getattr(sys.modules.get("torch"), "__version__", "not imported")
    head = f"tightfit {__version__}, Python {platform.python_version()}, torch {torch}, {platform.platform()}\nin {during}\n\n"
    try:
        handle, path = tempfile.mkstemp(prefix=_PREFIX, suffix=".txt", text=True)
        with open(handle, "w", encoding="utf-8") as file:
            file.write(head + trace)
    # A full disk must not hide the error itself; the message then points to --debug.
    except OSError:
        return ""
    _drop_oldest(Path(path).parent)
    return path


def _drop_oldest(folder: Path) -> None:
    """A script that meets the same bug each night does not fill the folder for temporary files."""
    with contextlib.suppress(OSError):
        files = [
            entry
            for entry in os.scandir(folder)
            if entry.name.startswith(_PREFIX) and entry.is_file(follow_symlinks=False)
        ]
        for entry in sorted(files, key=lambda entry: entry.stat().st_mtime_ns)[:-MAX_FILES]:
            # Those of another user stay: the folder is usually one from which only the owner of a file can remove it.
            with contextlib.suppress(OSError):
                os.unlink(entry.path)


@contextmanager
def answering(during: str, *, technique: str = "") -> Iterator[None]:
    """For a block in which only our own code runs: any exception other than a TightfitError is a bug of ours.

    Raises:
        InternalError: in place of such an exception.
    """
    try:
        yield
    except TightfitError:
        raise
    except Exception as error:
        if hasattr(error, _THEIRS) or _is_of_a_call(error):
            raise
        raise internal_error(error, during, technique=technique) from error


def _is_of_a_call(error: BaseException) -> bool:
    """Whether Python could not even call the function that this is the decorator of: it has no such argument, which is the caller's."""
    *_, (innermost, _line) = traceback.walk_tb(error.__traceback__)
    return isinstance(error, TypeError) and innermost.f_code.co_filename == contextlib.__file__


def note(error: BaseException, during: str) -> None:
    """Remembers an exception that leaves our code for the program's, if it is a bug of ours: the program may swallow it.

    Only the first is kept, as later ones may follow from it.
    """
    if isinstance(error, InternalError):
        _noted.append(error)
    elif not _noted and is_ours_below(error):
        _noted.append(internal_error(error, during))


def noted() -> InternalError | None:
    """Returns and clears the first bug that `note` remembered."""
    found = _noted[0] if _noted else None
    _noted.clear()
    return found
