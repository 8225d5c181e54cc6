"""Fails when a file, a function or a class has grown too large to read: 600 lines a file, 80 a function, 11 methods a class.

python tools/check_sizes.py src tests ...

Programs below `tests/scripts` are exempt: they are written as other people write theirs. So are classes of tests, whose methods are cases. Methods are counted as
`benchmarks.house` does, without the special ones: Python or torch calls those by names of its own, and a class cannot split them.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
MAX_METHODS = 11
EXEMPT = Path("tests/scripts")


def too_long(path: Path) -> Iterator[str]:
    """A sentence for each limit that the file at `path` breaks."""
    text = path.read_text()
    num_lines = text.count("\n")
    if num_lines > MAX_FILE_LINES:
        yield f"{path}: {num_lines} lines, at most {MAX_FILE_LINES}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"
        elif isinstance(node, ast.ClassDef) and "tests" not in path.parts:
            names = [part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
            num_methods = sum(name == "__init__" or not re.fullmatch(r"__\w+__", name) for name in names)
            if num_methods > MAX_METHODS:
                yield f"{path}:{node.lineno}: {node.name} has {num_methods} methods, at most {MAX_METHODS}"


def main(folders: list[str]) -> int:
    """Prints the files, functions and classes below `folders` that are too large; 1 if any is."""
    paths = [path for folder in folders for path in sorted(Path(folder).rglob("*.py")) if EXEMPT not in path.parents]
    faults = [fault for path in paths for fault in too_long(path)]
    print("\n".join(faults) or "sizes: all files, functions and classes are within the limits")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
