"""Runs the user's program in this process, for the commands that do so, and turns its end into an exit code."""

import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from tightfit.cli.arguments.terminated import as_under_python
from tightfit.errors import TightfitError
from tightfit.errors.faults import is_ours, noted, our_error

INTERRUPTED = 130
"""The exit code after Ctrl-C: 128 and the number of the signal, as shells have it."""


class Enough(BaseException):
    """Raised to end a program after the requested steps; a BaseException, so that `except Exception` does not catch it."""


def exit_code_of(run: Callable[[], None], path: str, *, shows_interrupts: bool = True) -> int:
    """Runs the program at `path`. Its own errors are printed as python would print them, an interrupt only if `shows_interrupts`.

    Raises:
        TightfitError: an error of ours ended it, or a bug of ours passed through it.
    """
    noted()  # of an earlier program
    try:
        with as_under_python():
            run()
    except TightfitError:
        raise
    except BaseException as error:
        is_shown = shows_interrupts or not isinstance(error, KeyboardInterrupt)
        code = _shown(error, path) if is_shown else INTERRUPTED
        own = noted() or our_error(error, "the run")
        if own is not None:
            raise own from error
        return code
    # The program may have swallowed it (`except Exception: continue`) and ended as if all were well.
    fault = noted()
    if fault is not None:
        raise fault
    return 0


def _shown(error: BaseException, path: str) -> int:
    """Prints what ended the program, unless it was ours alone, and returns its exit code."""
    if isinstance(error, Enough):
        return 0
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        # sys.exit("text") prints the text and exits with 1 (Python, library reference of SystemExit).
        sys.stderr.write(f"{error.code}\n")
        return 1
    if not is_ours(error):
        # Frames of ours and of runpy are left out: the traceback begins in the script, as with plain python.
        own = error.__traceback__
        while own is not None and own.tb_frame.f_code.co_filename not in (path, str(Path(path).resolve())):
            own = own.tb_next
        if own is None and isinstance(error, KeyboardInterrupt):
            # Before the script began, or after its end: nothing of its own to show.
            raise error
        traceback.print_exception(type(error), error, own or error.__traceback__)
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
