"""Puts calls of the guard around the turns of training loops, in the syntax tree of a script. No torch.

    for batch in loader:                    loop = guard.loop(0)
        BODY                                for batch in loop.turns(loader):
                                                turn = loop.begin(...the values of the names in BODY...)
                                                try:
                                                    BODY
                                                except Exception as error:
                                                    if not turn.failed(error):
                                                        raise
                                                finally:
                                                    turn.end()
                                                if turn.has_failed:
                                                    ...drop what the turn has bound...
                                                    turn.take_back()
                                                    ...bind what was bound before...

After that `turns` hands out the same item once more, so that `break`, `continue`, `return` and `else` mean what they meant. What is added has the
line number of the loop.
"""

import ast
from collections.abc import Sequence

from tightfit.guarding.loops.find_loops import Loop, own_nodes
from tightfit.guarding.loops.names_of_turn import TurnNames, binds, names_of_turn

# Among the builtins while a guarded script runs, since every module of the program sees these.
GUARD = "__tightfit_guard__"


def rewrite(tree: ast.Module, loops: Sequence[Loop], *, first: int = 0) -> list[TurnNames]:
    """Rewrites `loops`, which are nodes of `tree`, in place, and numbers them from `first` on; returns the names of each, by its number."""
    rewriter = _Rewriter(loops, first)
    rewriter.visit(tree)
    ast.fix_missing_locations(tree)
    return rewriter.names


class _Rewriter(ast.NodeTransformer):
    def __init__(self, loops: Sequence[Loop], first: int) -> None:
        self._chosen = {id(loop) for loop in loops}
        self._first = first
        self.names: list[TurnNames] = []
        # Whether the scopes around a node bind a `next` of their own, from the module on.
        self._own_next: list[bool] = []

    def visit_Module(self, node: ast.Module) -> ast.AST:
        # What a function declares to be global it may bind there.
        is_global = any(isinstance(each, ast.Global) and "next" in each.names for each in ast.walk(node))
        self._own_next.append(is_global or binds(node, "next"))
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._scope(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._scope(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        # Its methods do not see what it binds; loops of its own body are not told apart.
        return self.generic_visit(node)

    def _scope(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        self._own_next.append(binds(node, "next"))
        self.generic_visit(node)
        self._own_next.pop()
        return node

    def visit_For(self, node: ast.For) -> ast.AST | list[ast.stmt]:
        return self._loop(node)

    def visit_While(self, node: ast.While) -> ast.AST | list[ast.stmt]:
        return self._loop(node)

    def _loop(self, node: Loop) -> ast.AST | list[ast.stmt]:
        is_chosen = id(node) in self._chosen
        self.generic_visit(node)
        if not is_chosen:
            return node
        number = self._first + len(self.names)
        names = names_of_turn(node.body)
        self.names.append(names)
        loop, turn = f"__tightfit_loop_{number}__", f"__tightfit_turn_{number}__"
        is_own = any(self._own_next)
        drawn = set[str]() if is_own else _drawn_from(node.body)
        used_otherwise = _used_otherwise(node.body)
        changes = _ChangedBody(turn, replaces_next=not is_own)
        body = [changes.visit(statement) for statement in node.body]
        if isinstance(node, ast.For):
            node.iter = _call(f"{loop}.turns", node.iter)
        else:
            node.test = ast.BoolOp(op=ast.Or(), values=[_call(f"{loop}.is_again"), node.test])
        shell = _parsed(_SHELL.format(turn=turn), node)[0]
        assert isinstance(shell, ast.Try)
        shell.body = body
        alone = sorted(drawn - used_otherwise)
        seen = "".join(_SEEN.format(turn=turn, name=name) for name in sorted(names.read | names.bound))
        node.body = [
            *_parsed(f"{turn} = {loop}.begin({alone!r}{', next' if drawn else ''})\n{seen}{turn}.enter()", node),
            shell,
            *_parsed(_taken_back(turn, sorted(names.bound)), node),
        ]
        return [*changes.declared, *_parsed(f"{loop} = {GUARD}.loop({number})", node), node]


_SHELL = """
try:
    pass
except Exception as __tightfit_error__:
    if not {turn}.failed(__tightfit_error__):
        raise
finally:
    {turn}.end()
"""
_SEEN = """
try:
    {turn}.variables.sees({name!r}, {name})
except NameError:
    pass
"""


def _parsed(source: str, loop: Loop) -> list[ast.stmt]:
    """Statements of ours, at the place of the loop."""
    statements = ast.parse(source).body
    for statement in statements:
        for node in ast.walk(statement):
            if hasattr(node, "lineno"):
                ast.copy_location(node, loop)
                # The loop may be long, and Python shows the last line of a call.
                node.end_lineno, node.end_col_offset = node.lineno, node.col_offset  # type: ignore[attr-defined]
    return statements


def _taken_back(turn: str, bound: Sequence[str]) -> str:
    lines = [f"if {turn}.has_failed:"]
    for name in bound:
        # Bound first: a variable that has no value cannot be deleted.
        lines.append(
            f"    try:\n        {turn}.variables.compares({name!r}, {name})\n    except NameError:\n        pass"
        )
        lines.append(f"    if {turn}.variables.drops({name!r}):\n        {name} = None\n        del {name}")
    lines.append(f"    {turn}.take_back()")
    lines += [
        f"    if {turn}.variables.had({name!r}):\n        {name} = {turn}.variables.value({name!r})" for name in bound
    ]
    return "\n".join(lines)


def _call(function: str, *arguments: ast.expr) -> ast.Call:
    parsed = ast.parse(function, mode="eval").body
    return ast.Call(func=parsed, args=list(arguments), keywords=[])


class _ChangedBody(ast.NodeTransformer):
    """Replaces `next(NAME)`, whose items come again when the turn does, and takes out `global` and `nonlocal`: they stand before all uses of their names, ours among them."""

    def __init__(self, turn: str, *, replaces_next: bool) -> None:
        self.declared: list[ast.stmt] = []
        self._turn = turn
        self._replaces_next = replaces_next

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if self._replaces_next and _is_next(node):
            node.func = ast.copy_location(ast.parse(f"{self._turn}.next", mode="eval").body, node)
            for each in ast.walk(node.func):
                ast.copy_location(each, node)
        return node

    def visit_Global(self, node: ast.Global) -> ast.AST:
        return self._declaration(node)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.AST:
        return self._declaration(node)

    def _declaration(self, node: ast.stmt) -> ast.AST:
        self.declared.append(node)
        return ast.copy_location(ast.Pass(), node)

    def _other_scope(self, node: ast.AST) -> ast.AST:
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda = _other_scope  # noqa: N815


def _is_next(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "next"
        and bool(node.args)
        and isinstance(node.args[0], ast.Name)
    )


def _drawn_from(body: Sequence[ast.stmt]) -> set[str]:
    found = set[str]()
    for statement in body:
        for node in (statement, *own_nodes(statement)):
            if _is_next(node):
                assert isinstance(node, ast.Call)
                assert isinstance(node.args[0], ast.Name)
                found.add(node.args[0].id)
    return found


def _used_otherwise(body: Sequence[ast.stmt]) -> set[str]:
    """The variables that a turn uses in another way than to ask them for items, or whether there is any: such an iterator is state of the turn too."""
    own = [node for statement in body for node in (statement, *own_nodes(statement))]
    alone = {id(node.args[0]) for node in own if _is_next(node) or _is_asked_alone(node)}  # type: ignore[attr-defined]
    alone |= {id(node.left) for node in own if isinstance(node, ast.Compare) and _is_with_none(node)}
    every = (node for statement in body for node in ast.walk(statement))
    return {n.id for n in every if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and id(n) not in alone}


def _is_asked_alone(node: ast.AST) -> bool:
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and bool(node.args)
    return is_call and node.func.id in ("len", "iter", "isinstance")  # type: ignore[attr-defined]


def _is_with_none(node: ast.Compare) -> bool:
    (operation, *more), (other, *_) = node.ops, node.comparators
    return not more and isinstance(operation, ast.Is | ast.IsNot) and isinstance(other, ast.Constant)
