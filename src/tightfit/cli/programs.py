"""The user's program in this process, for the commands that run it: however it ends becomes an exit code."""

import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from tightfit.errors import TightfitError
from tightfit.errors.faults import is_ours, noted, our_error

_INTERRUPTED = 130


class Enough(BaseException):
    """The steps that were asked for are over; not an error, and not for a program to catch."""


def exit_code_of(run: Callable[[], None], path: str) -> int:
    """Runs the program at `path`. An error of its own is shown as python would show it.

    Raises:
        TightfitError: one of ours ended it, or a fault of ours went through it.
    """
    noted()  # of an earlier program
    try:
        run()
    except TightfitError:
        raise
    except BaseException as error:
        code = _shown(error, path)
        own = noted() or our_error(error, "the run")
        if own is not None:
            raise own from error
        return code
    fault = noted()
    if fault is not None:
        raise fault
    return 0


def _shown(error: BaseException, path: str) -> int:
    """Says what ended the program, unless it was ours alone; its exit code."""
    if isinstance(error, Enough):
        return 0
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        sys.stderr.write(f"{error.code}\n")
        return 1
    if not is_ours(error):
        own = error.__traceback__
        while own is not None and own.tb_frame.f_code.co_filename not in (path, str(Path(path).resolve())):
            own = own.tb_next
        traceback.print_exception(type(error), error, own or error.__traceback__)
    return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
