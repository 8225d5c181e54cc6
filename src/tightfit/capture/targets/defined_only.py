"""Scripts that define functions and call none of them: what to name in their place."""

import ast
from collections.abc import Iterator
from pathlib import Path

_SAYS_NOTHING = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Import,
    ast.ImportFrom,
    ast.Assign,
    ast.AnnAssign,
)
_MOST_NAMES = 3


def hint_for(path: str) -> str | None:
    """What to do with a script that only defines functions; None for one that does something, or cannot be read as Python."""
    try:
        body = ast.parse(Path(path).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return None
    if not all(isinstance(each, _SAYS_NOTHING) or _is_text(each) for each in body):
        return None
    functions = [each for each in body if isinstance(each, ast.FunctionDef)]
    yielding = [each.name for each in functions if any(isinstance(n, ast.Yield | ast.YieldFrom) for n in _inside(each))]
    name = Path(path).name
    if yielding:
        return f"{name} only defines functions: name one that yields once per step, {' or '.join(f'{path}:{each}' for each in yielding[:_MOST_NAMES])}"
    if functions:
        called = " and ".join(f"{each.name}()" for each in functions[:_MOST_NAMES])
        more = " and more" if len(functions) > _MOST_NAMES else ""
        return f"{name} only defines {called}{more}, and calls nothing: call what trains at its end"
    return None


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _inside(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """What is in a function itself, and not in one that it defines."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            waiting += ast.iter_child_nodes(node)
