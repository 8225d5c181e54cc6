"""The lines of the user's code that run, from the innermost out: those of a stack, and those that an exception passed."""

import os
from types import FrameType

from tightfit.capture.after_steps.unreached import RunningLine
from tightfit.capture.observe.attribution import is_user_file

_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__)))) + os.sep


def lines_of(frame: FrameType | None) -> list[RunningLine]:
    """The lines of the user's code on the stack, from the innermost out."""
    found = []
    while frame is not None:
        code = frame.f_code
        if is_user_file(code.co_filename):
            found.append(RunningLine(code.co_filename, frame.f_lineno, code.co_firstlineno, code.co_name))
        frame = frame.f_back
    return found


def places_of(error: BaseException) -> list[RunningLine]:
    """The lines of the user's code that an exception passed, from the innermost out."""
    found, traceback = [], error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if is_user_file(code.co_filename):
            found.append(RunningLine(code.co_filename, traceback.tb_lineno, code.co_firstlineno, code.co_name))
        traceback = traceback.tb_next
    return found[::-1]


def is_between_our_lines(frame: FrameType | None) -> bool:
    """Whether an exception raised in `frame` would pass through our own code before it comes to the user's."""
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        if os.path.realpath(frame.f_code.co_filename).startswith(_OURS):
            return True
        frame = frame.f_back
    return False
