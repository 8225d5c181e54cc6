"""Whether a program that ended by `sys.exit` has come to its end: `sys.exit(main())` is how many do."""

import ast
import types
from pathlib import Path


def is_behind_all(error: SystemExit, path: str) -> bool:
    """Whether the script at `path` has left without an error in its last statement, where a run without the exit would have ended as well. A library may have left for it, as
    those for command lines do."""
    return error.code in (None, 0) and _last_exit(error, path) is not None


def is_plainly_behind_all(error: SystemExit, path: str) -> bool:
    """Whether the last statement of the script at `path` leaves with an error that is written there (`sys.exit(7)`): one that a function returns may be of one that left early."""
    last = _last_exit(error, path)
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        given = last.value.args
    elif isinstance(last, ast.Raise) and isinstance(last.exc, ast.Call):
        given = last.exc.args
    else:
        return False
    return all(isinstance(each, ast.Constant | ast.JoinedStr) for each in given)


def _last_exit(error: SystemExit, path: str) -> ast.stmt | None:
    """The last statement of the script at `path`, if that is where `error` has left it."""
    line = None
    trace: types.TracebackType | None = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename == path:
            # A function of the script's own may leave anywhere.
            line = trace.tb_lineno if code.co_name == "<module>" else None
        trace = trace.tb_next
    try:
        last: ast.stmt | None = ast.parse(Path(path).read_bytes()).body[-1]
    except (OSError, SyntaxError, ValueError, IndexError):
        return None
    # What an `else` holds is not behind the other way.
    while isinstance(last, ast.If | ast.Try | ast.With):
        last = None if isinstance(last, ast.If) and last.orelse else last.body[-1]
    is_there = line is not None and last is not None and last.lineno <= line <= (last.end_lineno or last.lineno)
    return last if is_there else None
