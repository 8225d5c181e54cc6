"""Functions of a program's source: their statements, loops and local names, without those of functions inside of them."""

import ast
import dataclasses
from collections.abc import Iterator, Set

from tightfit.analysis.source.carried_values import carries

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Loop = ast.For | ast.AsyncFor | ast.While
# Calls that end or begin the work of a step in a training loop.
_STEPS = frozenset({"step", "backward", "training_step"})


@dataclasses.dataclass(frozen=True, slots=True)
class Scope:
    """A function, or a module outside of its functions. `statements` are in the order of the source, those of loops and branches included."""

    node: _Function | ast.Module
    statements: tuple[ast.stmt, ...]

    @property
    def name(self) -> str:
        """As code objects have it."""
        return "<module>" if isinstance(self.node, ast.Module) else self.node.name

    @property
    def is_module(self) -> bool:
        """Whether it is a module."""
        return isinstance(self.node, ast.Module)

    @property
    def outer_names(self) -> frozenset[str]:
        """The names that a function declares to be of its module, or of a function around it."""
        return frozenset(
            name for one in self.statements if isinstance(one, ast.Global | ast.Nonlocal) for name in one.names
        )

    @property
    def local_names(self) -> frozenset[str]:
        """The names that assignments bind in a function; empty for a module."""
        if isinstance(self.node, ast.Module):
            return frozenset()
        return frozenset(name for one in self.statements for name in bound_names(one)) - self.outer_names

    def loops_around(self, statement: ast.stmt) -> list[_Loop]:
        """The loops of this scope that the statement is in, the innermost first."""
        loops = [one for one in self.statements if isinstance(one, _Loop) and one is not statement]
        return [loop for loop in loops if any(node is statement for node in ast.walk(loop))][::-1]

    def has_step(self, loop: _Loop) -> bool:
        """Whether an iteration of the loop has a step of training in it, or yields one."""
        return any(
            isinstance(node, ast.Yield)
            or (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _STEPS)
            for node in _own_nodes(loop)
        )

    def calls(self, method: str) -> list[ast.Call]:
        """The calls of a method of that name."""
        return [
            node
            for node in _own_nodes(self.node)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method
        ]

    def begins_anew_in(self, loop: _Loop, names: Set[str]) -> bool:
        """Whether an iteration of the loop begins one of `names` anew: as the loop's variable, or as `begins_anew` has it."""
        inside = {id(node) for node in ast.walk(loop)}
        return bool(names & bound_names(loop)) or any(
            begins_anew(one, names) for one in self.statements if id(one) in inside
        )


def scope_at(tree: ast.Module, line: int) -> Scope:
    """The innermost function around `line`, or the module."""
    innermost: _Function | ast.Module = tree
    for node in ast.walk(tree):
        # Functions inside of others come later, and are the ones that are meant.
        if isinstance(node, _Function) and node.lineno <= line <= (node.end_lineno or node.lineno):
            innermost = node
    return Scope(innermost, tuple(_statements(innermost.body)))


def scopes_of(tree: ast.Module) -> list[Scope]:
    """The module and each of its functions."""
    functions = [node for node in ast.walk(tree) if isinstance(node, _Function)]
    return [Scope(node, tuple(_statements(node.body))) for node in (tree, *functions)]


def bound_names(statement: ast.stmt) -> set[str]:
    """The names (and attributes, `self.total`) that an assignment, a loop or a `with` binds; empty for another statement."""
    match statement:
        case ast.Assign():
            targets = list(statement.targets)
        case ast.AnnAssign() | ast.For() | ast.AsyncFor():
            targets = [statement.target]
        case ast.With() | ast.AsyncWith():
            targets = [item.optional_vars for item in statement.items if item.optional_vars is not None]
        case _:
            targets = []
    found: set[str] = set()
    while targets:
        target = targets.pop()
        match target:
            case ast.Tuple() | ast.List():
                targets = [*targets, *target.elts]
            case ast.Starred():
                targets = [*targets, target.value]
            case ast.Name() | ast.Attribute():
                found.add(text_of(target))
    return found


def lines_of(statement: ast.stmt) -> range:
    """The lines of a statement; of a loop, a branch or a `with` those of its head."""
    last = statement.end_lineno or statement.lineno
    body = getattr(statement, "body", None)
    return range(statement.lineno, max(statement.lineno + 1, body[0].lineno) if body else last + 1)


def text_of(expression: ast.expr) -> str:
    """An expression as one writes it, whether it is read or bound."""
    return ast.unparse(expression)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        if not isinstance(statement, _Function | ast.ClassDef):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(statement, part, []))
            for clause in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
                yield from _statements(clause.body)


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _Function | ast.ClassDef | ast.Lambda):
            yield child
            yield from _own_nodes(child)


def begins_anew(statement: ast.stmt, names: Set[str]) -> bool:
    """Whether the statement gives one of `names` a value that is not made of its last one: an assignment, `clear()`, `del`."""
    match statement:
        case ast.Assign() | ast.AnnAssign() if statement.value is not None and names & bound_names(statement):
            # `hidden = hidden.detach()` reads itself, and has no graph any more.
            return not carries(statement.value, names, "graph")
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="clear" | "detach_", value=holder))):
            return text_of(holder) in names
        case ast.Delete():
            return any(text_of(target).partition("[")[0] in names for target in statement.targets)
        case _:
            return False
