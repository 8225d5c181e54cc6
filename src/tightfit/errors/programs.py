"""One-line messages for exceptions of the user's program: the place in the program's own code, and the first cause."""

import os
import sysconfig
import traceback

from tightfit.errors.faults import chain, is_own_file

_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib", "stdlib", "platstdlib")})


def one_line(label: str, error: BaseException) -> str:
    """A line that says that `label` raised `error`, where, and what its first cause was."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{label} has a syntax error at {os.path.relpath(error.filename)}:{error.lineno}: {error.msg}"
    first = chain(error)[-1]
    place = _place(error) or _place(first)
    where = f" at {place}" if place else ""
    cause = "" if first is error else f" (caused by {type(first).__name__}{_at(first, place)}: {_first_line(first)})"
    return f"{label} raised {type(error).__name__}{where}: {_first_line(error)}{cause}"


def _first_line(error: BaseException) -> str:
    said = str(error).strip().splitlines()
    # Transformers' lazy imports end their message with this hint, which makes no sense without the traceback.
    return said[0].removesuffix(" (look up to see its traceback):") if said else "(no message)"


def _at(error: BaseException, known: str | None) -> str:
    place = _place(error)
    return f" at {place}" if place and place != known else ""


def _place(error: BaseException) -> str | None:
    """The innermost line of the program's own code, or else of a library's, that an exception went through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_own_file(f.filename)]
    own = [f for f in frames if not f.filename.startswith(("<", *_LIBRARIES)) and "site-packages" not in f.filename]
    # Code that a library generated (torch.fx), or a command of an installed package, leaves no frame of the program's own.
    found = own or frames
    return f"{os.path.relpath(found[-1].filename)}:{found[-1].lineno}" if found else None
