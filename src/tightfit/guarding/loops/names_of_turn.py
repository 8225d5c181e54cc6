"""The variables that one turn of a loop reads and binds. No torch."""

import ast
import dataclasses
from collections.abc import Iterator, Sequence

from tightfit.guarding.loops.find_loops import own_nodes

# By which code reaches attributes whose names are texts.
_BY_NAME = frozenset({"getattr", "setattr", "delattr", "vars", "__dict__", "__setattr__", "__getattribute__"})
# By which it reaches all variables of its module.
_ALL_GLOBALS = frozenset({"globals", "locals", "vars", "exec", "eval"})
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TurnNames:
    """`read` are all names that the turn reads; `bound` those that it binds; `fresh` those of them that it binds before it reads them, on every path."""

    read: frozenset[str]
    bound: frozenset[str]
    fresh: frozenset[str]
    attributes: frozenset[str]

    @property
    def reads_all_globals(self) -> bool:
        """Whether the turn may reach a variable of its module by a name that is made at run time."""
        return not _ALL_GLOBALS.isdisjoint(self.read)


def names_of_turn(body: Sequence[ast.stmt]) -> TurnNames:
    """The names in the body of a loop."""
    read, bound, fresh = set[str](), set[str](), set[str]()
    every = [node for each in body for node in ast.walk(each)]
    attributes = {node.attr for node in every if isinstance(node, ast.Attribute)}
    if not _BY_NAME.isdisjoint(attributes | {node.id for node in every if isinstance(node, ast.Name)}):
        texts = (node.value for node in every if isinstance(node, ast.Constant))
        attributes |= {text for text in texts if isinstance(text, str) and text.isidentifier()}
    for statement, is_sure in _in_order(body):
        own_read = set(_read(statement))
        own_bound = set(_bound(statement))
        if is_sure:
            fresh |= own_bound - own_read - read - bound
        read |= own_read
        bound |= own_bound
    return TurnNames(
        read=frozenset(read), bound=frozenset(bound), fresh=frozenset(fresh), attributes=frozenset(attributes)
    )


def binds(scope: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> bool:
    """Whether a module or a function binds a name of its own."""
    if not isinstance(scope, ast.Module):
        given = scope.args
        arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        if any(argument is not None and argument.arg == name for argument in arguments):
            return True
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    # What these bind inside is none of the scope's.
    return any(
        statement.name == name if isinstance(statement, definitions) else name in _bound(statement)
        for statement in scope.body
    )


def _in_order(body: Sequence[ast.stmt]) -> Iterator[tuple[ast.AST, bool]]:
    """Each statement, and whether all that it binds is bound whenever it is run to its end; the parts of `with` one by one."""
    for statement in body:
        if isinstance(statement, ast.With):
            for item in statement.items:
                yield item, True
            yield from _in_order(statement.body)
        else:
            is_plain = isinstance(statement, ast.Assign | ast.AnnAssign | ast.FunctionDef | ast.Import | ast.ImportFrom)
            yield statement, is_plain


def _read(node: ast.AST) -> Iterator[str]:
    # What inner functions and comprehensions read is read here too, or might be.
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Store):
            yield each.id
        elif isinstance(each, ast.AugAssign) and isinstance(each.target, ast.Name):
            yield each.target.id


def _bound(node: ast.AST) -> Iterator[str]:
    """What is bound in the loop's own scope: neither in functions nor by comprehensions, but for their `:=`."""
    inside = {
        id(name)
        for each in ast.walk(node)
        if isinstance(each, _COMPREHENSIONS)
        for generator in each.generators
        for name in ast.walk(generator.target)
    }
    for each in (node, *own_nodes(node)):
        if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load) and id(each) not in inside:
            yield each.id
        elif isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield each.name
        elif isinstance(each, ast.alias):
            if each.name != "*":
                yield each.asname or each.name.partition(".")[0]
        elif isinstance(each, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and each.name:
            yield each.name
        elif isinstance(each, ast.MatchMapping) and each.rest:
            yield each.rest
