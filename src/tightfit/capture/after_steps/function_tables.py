"""Functions without a `def` of their own, and tables of functions: `SIZE = lambda step: 32 if step < 5 else 128`, `PHASES = {0: freeze, 100: unfreeze}`.

A lambda that a name is given is a function of that name. Of a table, which a loop selects from by something that changes from turn to turn
(`PHASES.get(step, nothing)(model)`), each function may run in a later turn.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tightfit.capture.after_steps.named_lambdas import TABLES, entries_of, given_name
from tightfit.capture.after_steps.names_of_modules import last_name

_CALLED = (ast.Attribute, ast.Name)


class FunctionTables:
    """The tables of a program with `functions`, by name. A name that a loop or an assignment takes from a table stands for all of it."""

    def __init__(self, trees: Iterable[ast.Module], functions: Mapping[str, Sequence[ast.AST]]) -> None:
        self._entries: dict[str, list[ast.expr]] = {}
        self._functions = functions
        self._names: dict[str, str] = {}
        self.by_text: set[str] = set()
        """The tables whose keys are text, such as those of activations: a setting selects from these, and no step."""
        nodes = [node for tree in trees for node in ast.walk(tree)]
        for node in nodes:
            value = getattr(node, "value", None)
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(value, TABLES) and given_name(node):
                entries = [each for each in entries_of(value) if self._is_function(each)]
                if entries:
                    self._entries.setdefault(given_name(node), []).extend(entries)
                    if isinstance(value, ast.Dict) and all(_is_text(key) for key in value.keys):
                        self.by_text.add(given_name(node))
        for node in nodes:
            taken, target = self._taken(node)
            if taken and target is not None:
                self._names.update((each.id, taken) for each in ast.walk(target) if isinstance(each, ast.Name))

    def _is_function(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Lambda) or (isinstance(node, _CALLED) and last_name(node) in self._functions)

    def _taken(self, node: ast.AST) -> tuple[str, ast.expr | None]:
        """The table that a loop or an assignment takes its names from, and these."""
        if isinstance(node, ast.For):
            source, target = node.iter, node.target
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and _selection(node.value) is not None:
            source, target = node.value, node.targets[0]
        else:
            return "", None
        named = [last_name(each) for each in ast.walk(source) if isinstance(each, _CALLED)]
        return next((name for name in named if name in self._entries), ""), target

    def functions_of(self, node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
        """The functions of the table that `node` names, if it does: names and nodes, those of lambdas being the table's."""
        name = last_name(node) if isinstance(node, _CALLED) else ""
        name = self._names.get(name, name)
        for entry in self._entries.get(name, ()):
            if isinstance(entry, ast.Lambda):
                yield name, entry
            else:
                yield from ((last_name(entry), each) for each in self._functions.get(last_name(entry), ()))

    def selected_by(self, node: ast.AST) -> tuple[str, ast.expr] | None:
        """The table that an expression takes a function from, and by what; None of another one."""
        found = _selection(node)
        return (found[0], found[1]) if found is not None and found[0] in self._entries else None


def _is_text(key: ast.expr | None) -> bool:
    return isinstance(key, ast.Constant) and isinstance(key.value, str)


def _selection(node: ast.AST) -> tuple[str, ast.expr] | None:
    """The name of what an expression takes one value of, and by what: `table[index]`, `table.get(index)`."""
    match node:
        case ast.Subscript(value=ast.Name() | ast.Attribute() as table, slice=index, ctx=ast.Load()):
            return None if isinstance(index, ast.Slice | ast.Constant) else (last_name(table), index)
        case ast.Call(
            func=ast.Attribute(value=ast.Name() | ast.Attribute() as table, attr="get" | "pop"), args=[index, *_]
        ):
            return None if isinstance(index, ast.Constant) else (last_name(table), index)
    return None
