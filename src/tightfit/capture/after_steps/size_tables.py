"""Finds sizes that a later turn of a loop takes out of a table: `for batch in [64] * 100 + [4096]`, `schedule[step]`, `lengths.get(epoch)`.

Nothing in such a loop decides: the table does. Tables are lists, tuples and dicts of whole numbers that the program has as literals, by themselves or under a name.
"""

import ast
from collections.abc import Iterator, Sequence

from tightfit.capture.after_steps.changing_sizes import Sizes
from tightfit.capture.after_steps.rewriting import called

# A trace sees the first turns of a loop.
_SEEN = 3
_HANDED_ON = frozenset({"list", "tuple", "iter", "cycle", "deque", "array", "tensor", "chain"})
# Of a list that is multiplied, no more is looked at.
_MOST = 1000


class SizeTables:
    """The tables of a program, and where a loop takes sizes from them."""

    def __init__(self, trees: Sequence[ast.Module], sizes: Sizes) -> None:
        self._sizes = sizes
        self._named: dict[str, list[int]] = {}
        for node in (node for tree in trees for node in ast.walk(tree)):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                numbers = self._numbers(node.value)
                if numbers and not isinstance(node.value, ast.Constant | ast.Name):
                    self._named[node.targets[0].id] = numbers

    def later_in(self, loop: ast.For | ast.While) -> Iterator[tuple[ast.expr, str]]:
        """The expressions that give larger sizes in later turns than in the first ones, in words."""
        if isinstance(loop, ast.For):
            for target, source in _pairs(loop.target, loop.iter):
                numbers = self._numbers(source)
                if numbers and self._sizes.reads(target) and max(numbers) > max(numbers[:_SEEN]):
                    yield source, f"{ast.unparse(target)} = {max(numbers)}"
        for node in (node for statement in loop.body for node in ast.walk(statement)):
            table = _table_of(node)
            numbers = None if table is None else self._numbers(table)
            if numbers and isinstance(node, ast.expr) and max(numbers) > numbers[0] and self._sizes.told(node):
                yield node, f"a size of {max(numbers)} from {ast.unparse(node)}"

    def _numbers(self, node: ast.expr) -> list[int] | None:
        """The whole numbers of a table, in its order; None where it is none, or has others."""
        found: list[int] | None = None
        match node:
            case ast.Constant(value=int(number)) if not isinstance(number, bool):
                found = [number]
            case ast.Name(id=name):
                found = self._named.get(name)
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Dict(values=parts):
                found = self._joined(parts)
            case ast.BinOp(op=ast.Add(), left=left, right=right):
                found = self._joined([left, right])
            case ast.BinOp(op=ast.Mult(), left=ast.List() | ast.Tuple() as table, right=ast.Constant(value=int(times))):
                found = (self._numbers(table) or [])[:_MOST] * min(times, _MOST) or None
            case ast.Call(args=[first, *_]) if called(node) in _HANDED_ON:
                found = self._numbers(first)
        return found

    def _joined(self, parts: Sequence[ast.expr]) -> list[int] | None:
        found = [self._numbers(part) for part in parts]
        return None if None in found else [number for numbers in found if numbers is not None for number in numbers]


def _pairs(target: ast.expr, source: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What a loop's names are taken from."""
    if isinstance(target, ast.Tuple) and isinstance(source, ast.Call) and called(source) in ("zip", "enumerate"):
        own = target.elts[1:] if called(source) == "enumerate" else target.elts
        yield from zip(own, source.args, strict=False)
    else:
        yield target, source


def _table_of(node: ast.AST) -> ast.expr | None:
    """The table that an expression takes one number from."""
    match node:
        case ast.Subscript(value=table, slice=index) if not isinstance(index, ast.Slice | ast.Constant):
            return table
        case ast.Call(func=ast.Attribute(value=table, attr="get"), args=[_, *_]):
            return table
    return None
