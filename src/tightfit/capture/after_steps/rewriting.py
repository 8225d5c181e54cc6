"""Compiles a user's source so that its loops can be left from outside, and so that it is known which branches ran.

Each `for` and `while` body begins with `if __tightfit_leave__[N] and __tightfit_left__(N): break`, and stands in a `try` whose handler catches an
exception of ours for that loop alone, and breaks; each branch and function marks itself once in `__tightfit_seen__`. Lines stay where they are, so that
tracebacks, `inspect.getsource` and attribution see the file as it is. Functions that another compiler reads (`numba.njit`, `triton.jit`) are left alone, and so are loops in the body of a class.
"""

import ast
import copy
import dataclasses
import re
from collections.abc import Sequence
from typing import Literal

from tightfit.capture.after_steps.conditional_expressions import ConditionalParts
from tightfit.capture.after_steps.named_lambdas import given_name, named_lambdas

LEAVE, LEFT, STEPS, SEEN = "__tightfit_leave__", "__tightfit_left__", "__tightfit_steps__", "__tightfit_seen__"
UNTIL, LEAVING = "__tightfit_until__", "__tightfit_leaving__"

_OTHER_COMPILERS = re.compile(r"jit|numba|vectorize|stencil|kernel", re.IGNORECASE)
# Iterables that only count: further turns of such a loop are further epochs.
_COUNTING = frozenset({"range", "trange", "count", "repeat", "cycle"})
_ENDLESS = frozenset({"count", "cycle"})
_TRANSPARENT = frozenset({"tqdm", "enumerate", "track", "progress_bar", "list", "iter"})
# Ends of a loop that a program may wait for in a handler; other handlers are for failures.
_ENDINGS = frozenset({"KeyboardInterrupt", "StopIteration"})
_MAX_CONDITION = 60


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UserLoop:
    """A loop: its own line, the lines of its body, and the first line and the name of the function that it stands in.

    `is_counting`: it runs until a condition or over a range, so that its turns differ in a number only; `is_endless`: it never ends by itself.
    """

    file: str
    line: int
    first: int
    last: int
    scope: tuple[int, str]
    is_for: bool
    is_counting: bool
    is_endless: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Statements that run on a condition: a branch of `if`, a handler of an exception, or the body of a function (a lambda's is that of the name that was
    given it, or its table).

    `test` is the condition of a branch; `loops` are the loops around it in its own function.
    """

    kind: Literal["branch", "handler", "function"]
    file: str
    statements: tuple[ast.stmt, ...]
    condition: str
    test: ast.expr | None
    loops: tuple[int, ...]
    function: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Around:
    """What is around a statement: the scope of its function, that function's name, the loops, and whether a class body holds it directly."""

    scope: tuple[int, str]
    function: str
    loops: tuple[int, ...] = ()
    is_class: bool = False


class Rewriter:
    """Rewrites one file; appends its loops and branches to the lists, whose positions are the numbers in the code.

    Before the first statement at line `until` or behind it the code calls `__tightfit_until__()`.
    """

    def __init__(self, file: str, loops: list[UserLoop], branches: list[Branch], *, until: int | None = None) -> None:
        self._file = file
        self._loops = loops
        self._branches = branches
        self._until = until

    def rewrite(self, tree: ast.Module) -> ast.Module:
        """The tree with checks and marks, in place."""
        tree.body = self._block(tree.body, _Around((1, "<module>"), ""))
        return ast.fix_missing_locations(tree)

    def _block(self, body: Sequence[ast.stmt], around: _Around) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        for at, statement in enumerate(body):
            if self._until is not None and statement.lineno >= self._until:
                out.append(_parsed(f"{UNTIL}()", statement))
                self._until = None
            out += self._statement(statement, around)
            following = body[at + 1 :]
            # `if (step + 1) % 500: continue` is a branch of what follows it.
            if following and isinstance(statement, ast.If) and not statement.orelse and _goes_elsewhere(statement.body):
                condition = f"unless {_text(statement.test)}"
                out.append(_mark(self._branch("branch", following, condition, statement.test, around), following))
            # Whoever iterates over a generator may leave it in the middle.
            if following and isinstance(statement, ast.For | ast.While) and _hands_out(statement):
                condition = f"when its loop at line {statement.lineno} ends"
                out.append(_mark(self._branch("branch", following, condition, None, around), following))
        return out

    def _statement(self, statement: ast.stmt, around: _Around) -> list[ast.stmt]:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._function(statement)
            case ast.ClassDef():
                inside = dataclasses.replace(around, is_class=True, loops=())
                statement.body = self._block(statement.body, inside)
            case ast.For() | ast.While() if not around.is_class:
                return self._loop(statement, around)
            case ast.If():
                self._if(statement, around)
            case ast.Try() | ast.TryStar():
                self._try(statement, around)
            case ast.With() | ast.AsyncWith() | ast.AsyncFor() | ast.For() | ast.While():
                statement.body = self._block(statement.body, around)
                if isinstance(statement, ast.AsyncFor | ast.For | ast.While):
                    statement.orelse = self._block(statement.orelse, around)
            case ast.Match():
                for case in statement.cases:
                    condition = f"case {_text(case.pattern)} of {_text(statement.subject)}"
                    number = self._branch("branch", case.body, condition, statement.subject, around)
                    case.body = [_mark(number, case.body), *self._block(case.body, around)]
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign() | ast.Expr() | ast.Return():
                self._mark_parts(statement, around)
            case _:
                pass
        return [statement]

    def _mark_parts(self, statement: ast.stmt, around: _Around) -> None:
        def mark_of(part: ast.expr, test: ast.expr, holds: bool) -> int:
            condition = f"{'if' if holds else 'unless'} {_text(test)}"
            return self._branch("branch", [ast.copy_location(ast.Expr(part), part)], condition, test, around)

        ConditionalParts(SEEN, mark_of).visit(statement)
        for function in named_lambdas(statement):
            self._lambda(function, given_name(statement), statement)

    def _lambda(self, function: ast.Lambda, name: str, statement: ast.stmt) -> None:
        if _OTHER_COMPILERS.search(name):
            return
        inside = _Around((function.lineno, name), name)
        body = ast.copy_location(ast.Expr(function.body), function.body)
        number = self._branch("function", [body], "", None, inside)
        self._mark_parts(body, inside)
        marked = _parsed(f"({SEEN}.__setitem__({number}, 1), None)[1]", statement)
        assert isinstance(marked, ast.Expr) and isinstance(marked.value, ast.Subscript)
        assert isinstance(marked.value.value, ast.Tuple)
        marked.value.value.elts[1] = body.value
        function.body = marked.value

    def _function(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if any(_OTHER_COMPILERS.search(ast.unparse(d)) for d in function.decorator_list):
            return
        first = min([function.lineno, *(d.lineno for d in function.decorator_list)])
        inside = _Around((first, function.name), function.name)
        has_docstring = ast.get_docstring(function, clean=False) is not None
        head, rest = (function.body[:1], function.body[1:]) if has_docstring else ([], function.body)
        mark = [_mark(self._branch("function", rest, "", None, inside), rest)] if rest else []
        function.body = [*head, *mark, *self._block(rest, inside)]

    def _loop(self, loop: ast.For | ast.While, around: _Around) -> list[ast.stmt]:
        number = len(self._loops)
        self._loops.append(
            UserLoop(
                file=self._file,
                line=loop.lineno,
                # The test of `while` is evaluated in each turn; what `for` iterates only once.
                first=loop.lineno if isinstance(loop, ast.While) else loop.body[0].lineno,
                last=loop.body[-1].end_lineno or loop.body[-1].lineno,
                scope=around.scope,
                is_for=isinstance(loop, ast.For),
                is_counting=isinstance(loop, ast.While) or (_counts(loop.iter) and not _selects(loop)),
                is_endless=_is_endless(loop),
            )
        )
        inside = dataclasses.replace(around, loops=(*around.loops, number))
        check = _parsed(f"if {LEAVE}[{number}] and {LEFT}({number}): break", loop.body[0])
        # What is to be caught is asked for only when there is an exception.
        turn = _parsed(f"try: pass\nexcept {LEAVING}({number}): break", loop.body[0])
        assert isinstance(turn, ast.Try)
        turn.end_lineno = loop.body[-1].end_lineno
        turn.body = [check, *self._block(loop.body, inside)]
        loop.body = [turn]
        begin = _parsed(f"{STEPS}[{number}] = 0", loop)
        if not loop.orelse:
            return [begin, loop]
        loop.orelse = self._block(loop.orelse, around)
        # A loop that ends by itself runs its `else`, which `break` would skip.
        after = _parsed(f"if {STEPS}[{number}] < 0: pass", loop.orelse[0])
        assert isinstance(after, ast.If)
        after.body = copy.deepcopy(loop.orelse)
        return [begin, loop, after]

    def _if(self, statement: ast.If, around: _Around) -> None:
        test = statement.test
        number = self._branch("branch", statement.body, f"if {_text(test)}", test, around)
        statement.body = [_mark(number, statement.body), *self._block(statement.body, around)]
        is_elif = len(statement.orelse) == 1 and isinstance(statement.orelse[0], ast.If)
        if is_elif or not statement.orelse:
            statement.orelse = self._block(statement.orelse, around)
        else:
            number = self._branch("branch", statement.orelse, f"unless {_text(test)}", test, around)
            statement.orelse = [_mark(number, statement.orelse), *self._block(statement.orelse, around)]

    def _try(self, statement: "ast.Try | ast.TryStar", around: _Around) -> None:
        statement.body = self._block(statement.body, around)
        for handler in statement.handlers:
            caught = {n.id for n in ast.walk(handler.type) if isinstance(n, ast.Name)} if handler.type else set()
            marks = []
            if caught & _ENDINGS:
                condition = f"on {', '.join(sorted(caught & _ENDINGS))}"
                marks = [_mark(self._branch("handler", handler.body, condition, None, around), handler.body)]
            handler.body = [*marks, *self._block(handler.body, around)]
        statement.orelse = self._block(statement.orelse, around)
        statement.finalbody = self._block(statement.finalbody, around)

    def _branch(
        self,
        kind: Literal["branch", "handler", "function"],
        body: Sequence[ast.stmt],
        condition: str,
        test: ast.expr | None,
        around: _Around,
    ) -> int:
        self._branches.append(
            Branch(
                kind=kind,
                file=self._file,
                statements=tuple(body),
                condition=condition,
                test=test,
                loops=around.loops,
                function=around.function,
            )
        )
        return len(self._branches) - 1


def _mark(number: int, body: Sequence[ast.stmt]) -> ast.stmt:
    """The statement before `body` that notes that the branch with that number is run."""
    return _parsed(f"{SEEN}[{number}] = 1", body[0])


def _parsed(text: str, place: ast.stmt) -> ast.stmt:
    """The statement `text`, all of it at the line of `place`."""
    (statement,) = ast.parse(text).body
    for node in ast.walk(statement):
        if isinstance(node, ast.stmt | ast.expr):
            node.lineno, node.col_offset = place.lineno, place.col_offset
            node.end_lineno, node.end_col_offset = place.lineno, place.col_offset
    return statement


def _goes_elsewhere(body: Sequence[ast.stmt]) -> bool:
    return isinstance(body[-1], ast.Continue | ast.Break | ast.Return | ast.Raise)


def _counts(iterable: ast.expr) -> bool:
    """Whether an iterable is a range, also behind `tqdm` and `enumerate`."""
    if not isinstance(iterable, ast.Call):
        return False
    name = called(iterable)
    if name in _COUNTING:
        return True
    return name in _TRANSPARENT and bool(iterable.args) and _counts(iterable.args[0])


def _is_endless(loop: ast.For | ast.While) -> bool:
    """Whether neither its condition nor its iterable ends a loop, and no `break` or `return` in its body does."""
    if isinstance(loop, ast.While):
        goes_on = isinstance(loop.test, ast.Constant) and bool(loop.test.value)
    else:
        goes_on = isinstance(loop.iter, ast.Call) and called(loop.iter) in _ENDLESS
    return goes_on and not any(isinstance(node, ast.Break | ast.Return) for s in loop.body for node in ast.walk(s))


def _hands_out(loop: ast.For | ast.While) -> bool:
    """Whether a loop that ends has a `yield`, not counting those of functions that are defined in it."""
    waiting: list[ast.AST] = [] if _is_endless(loop) else [*loop.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)
    return False


def _selects(loop: ast.For) -> bool:
    """Whether the number that a loop counts selects or scales something: `sizes[stage]`, `4 * 2**stage`."""
    names = {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}

    def is_number(node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in names

    return any(
        (isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and is_number(node.slice))
        or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow | ast.LShift) and is_number(node.right))
        for statement in loop.body
        for node in ast.walk(statement)
    )


def called(call: ast.Call) -> str:
    """The last part of the name that is called; empty where it has none."""
    function = call.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _text(expression: ast.expr | ast.pattern) -> str:
    text = " ".join(ast.unparse(expression).split())
    return text if len(text) <= _MAX_CONDITION else f"{text[: _MAX_CONDITION - 3]}..."
