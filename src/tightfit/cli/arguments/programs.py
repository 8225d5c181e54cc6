"""Runs the user's program in this process, for the commands that do so, and turns its end into an exit code."""

import contextlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from tightfit.cli.arguments.terminated import Terminated, as_under_python, with_last_words
from tightfit.errors import TightfitError
from tightfit.errors.faults import is_ours, noted, our_error

INTERRUPTED = 130
"""The exit code after Ctrl-C: 128 and the number of the signal, as shells have it."""
TERMINATED = 143
"""The same after SIGTERM."""

# What torch says where it has no GPU: a build without CUDA, one that finds no driver, and one whose cards are hidden.
_NO_GPU = ("Torch not compiled with CUDA enabled", "Found no NVIDIA driver", "No CUDA GPUs are available")


class Enough(BaseException):
    """Raised to end a program after the requested steps; a BaseException, so that `except Exception` does not catch it."""


def exit_code_of(
    run: Callable[[], None],
    path: str,
    *,
    closes_first: bool = False,
    at_the_end: Callable[[], None] | None = None,
    lowered_by: str = "",
) -> int:
    """Runs the program at `path`. Its own errors are printed as python would print them, an interrupt is one line that says where it was.

    With `at_the_end` SIGTERM is such a line too, after what that function says. With `closes_first` what `run` has open is closed at SIGTERM too, and nothing is said about either signal: the caller has more to say. `lowered_by` is a technique that has
    the program's weights in bfloat16, which its error may be about.

    Raises:
        TightfitError: an error of ours ended it, or a bug of ours passed through it.
    """
    noted()  # of an earlier program
    try:
        with (
            _told_to_end(path, at_the_end)
            if at_the_end
            else contextlib.nullcontext()
            if closes_first
            else as_under_python()
        ):
            run()
    except TightfitError:
        raise
    except Terminated:
        return TERMINATED
    except BaseException as error:
        is_shown = not (closes_first and isinstance(error, KeyboardInterrupt))
        code = _shown(error, path, lowered_by) if is_shown else INTERRUPTED
        own = noted() or our_error(error, "the run")
        if own is not None:
            raise own from error
        return code
    # The program may have swallowed it (`except Exception: continue`) and ended as if all were well.
    fault = noted()
    if fault is not None:
        raise fault
    return 0


def _told_to_end(path: str, at_the_end: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """SIGTERM says where the program was, and then ends it as it would under python."""

    def say(frame: FrameType | None) -> None:
        at_the_end()
        files = (path, str(Path(path).resolve()))
        lines = [number for each, number in traceback.walk_stack(frame) if each.f_code.co_filename in files]
        sys.stderr.write(f"tightfit: terminated{f' at {Path(path).name}:{lines[0]}' if lines else ''}\n")

    return with_last_words(say)


def _shown(error: BaseException, path: str, lowered_by: str) -> int:
    """Prints what ended the program, unless it was ours alone, and returns its exit code."""
    if isinstance(error, Enough):
        return 0
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        # sys.exit("text") prints the text and exits with 1 (Python, library reference of SystemExit).
        sys.stderr.write(f"{error.code}\n")
        return 1
    if is_ours(error):
        return 1
    files = (path, str(Path(path).resolve()))
    if isinstance(error, KeyboardInterrupt):
        lines = [
            number for frame, number in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename in files
        ]
        # There is none before the script began, and after its end.
        sys.stderr.write(f"tightfit: interrupted{f' at {Path(path).name}:{lines[-1]}' if lines else ''}\n")
        return INTERRUPTED
    # Frames of ours and of runpy are left out: the traceback begins in the script, as with plain python.
    own = error.__traceback__
    while own is not None and own.tb_frame.f_code.co_filename not in files:
        own = own.tb_next
    traceback.print_exception(type(error), error, own or error.__traceback__)
    if any(words in str(error) for words in _NO_GPU):
        sys.stderr.write(
            "tightfit: torch found no GPU on this machine: tightfit estimate and plan need none, tightfit run --virtual tries a plan on a virtual one, "
            "and run --gpus N --on cpu runs scripts that take the CPU where there is none\n"
        )
    if lowered_by and "bfloat16" in str(error).lower():
        sys.stderr.write(
            f"tightfit: {lowered_by} keeps the weights in bfloat16; if that is the cause, leave it out of the plan (tightfit plan --without {lowered_by})\n"
        )
    return 1
