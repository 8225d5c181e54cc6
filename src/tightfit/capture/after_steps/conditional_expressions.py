"""Marks the parts of an expression that run on a condition: `evaluate() if step % 500 == 0 else None`, `is_last and model.generate(...)`.

Each such part with a call in it, or that is a whole number (`64 if step < 100 else 4096`), becomes `(__tightfit_seen__.__setitem__(N, 1), PART)[1]`, which has the value of the part.
"""

import ast
from collections.abc import Callable

MarkOf = Callable[[ast.expr, ast.expr, bool], int]
"""Called with a part, its condition and whether that must hold (or must not); returns the number of the part's mark."""


_OF_NUMBERS = (ast.Add, ast.Sub, ast.Mult, ast.Pow, ast.LShift, ast.FloorDiv)


def is_whole_number(node: ast.AST) -> bool:
    """Whether an expression is a whole number by its looks: a constant, or arithmetic of constants and names."""
    if isinstance(node, ast.Constant):
        return type(node.value) is int
    if isinstance(node, ast.BinOp) and isinstance(node.op, _OF_NUMBERS):
        sides = (node.left, node.right)
        return any(map(is_whole_number, sides)) and all(
            is_whole_number(side) or isinstance(side, ast.Name | ast.Attribute) for side in sides
        )
    return False


class ConditionalParts(ast.NodeTransformer):
    """Marks the parts in one statement; code that runs later (lambdas, functions) is left as it is. `seen` is the name of what marks are set in."""

    def __init__(self, seen: str, mark_of: MarkOf) -> None:
        self._seen = seen
        self._mark_of = mark_of

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        """Both branches."""
        node.body, node.orelse = (
            self._part(node.body, node.test, holds=True),
            self._part(node.orelse, node.test, holds=False),
        )
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        """What comes after the first value."""
        test, holds = node.values[0], isinstance(node.op, ast.And)
        node.values[1:] = [self._part(value, test, holds=holds) for value in node.values[1:]]
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.expr:
        """Left as it is."""
        return node

    def _part(self, part: ast.expr, test: ast.expr, *, holds: bool) -> ast.expr:
        if not is_whole_number(part) and not any(isinstance(node, ast.Call) for node in ast.walk(part)):
            return part
        number = self._mark_of(part, test, holds)
        marked = ast.parse(f"({self._seen}.__setitem__({number}, 1), None)[1]", mode="eval").body
        assert isinstance(marked, ast.Subscript) and isinstance(marked.value, ast.Tuple)
        for node in ast.walk(marked):
            ast.copy_location(node, part)
        marked.value.elts[1] = self.visit(part)
        return marked
