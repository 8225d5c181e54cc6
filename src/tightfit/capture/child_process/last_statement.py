"""Whether a program that ended by `sys.exit` has come to its end: `sys.exit(main())` is how many do."""

import ast
import types
from pathlib import Path


def is_behind_all(error: SystemExit, path: str) -> bool:
    """Whether the script at `path` has left without an error in its last statement, where a run without the exit would have ended as well. A library may have left for it, as
    those for command lines do."""
    if error.code not in (None, 0):
        return False
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
        return False
    while isinstance(last, ast.If | ast.Try | ast.With):
        last = last.body[-1]
    return line is not None and last is not None and last.lineno <= line <= (last.end_lineno or last.lineno)
