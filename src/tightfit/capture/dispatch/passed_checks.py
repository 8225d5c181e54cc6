"""What a condition on unknown values reads as where one of its answers raises an error: the other one, as the program passes its own checks on a card.

`assert (x > 0).all()`, `if not torch.equal(a, b): raise ValueError(...)`, `ok = bool(mask.any())` with `if not ok: sys.exit(1)` behind it. The expression
that reads is found in the source, by the place that Python keeps for each instruction: bytecode changes with each release.
"""

import ast
import dis
import functools
import itertools
import linecache
import os
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType

import torch

from tightfit.errors.faults import is_own_file

_TORCH = os.path.dirname(torch.__file__) + os.sep
# Between an operator of the program and its handler; torch's own checks (`torch._assert`) are elsewhere.
_DISPATCHING = tuple(_TORCH + name for name in ("_compile.py", "_subclasses/", "_ops.py", "utils", "overrides.py"))
_EXITS = {"sys.exit", "exit", "quit", "os._exit", "os.abort"}
_LEAVES = (ast.Return, ast.Break, ast.Continue, ast.Try)

Place = tuple[int | None, int | None, int | None, int | None]
Outcomes = tuple[bool | None, bool | None]
"""The value of an expression where what is read is true, and where it is false; None where that decides nothing."""


def passing_answer(frame: FrameType | None) -> bool | None:
    """The answer that a check passes with, which reads a value on the card below `frame`; None if no check is known to."""
    while frame is not None and (
        is_own_file(frame.f_code.co_filename) or frame.f_code.co_filename.startswith(_DISPATCHING)
    ):
        frame = frame.f_back
    return None if frame is None else _answer(frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=4096)
def _answer(code: CodeType, offset: int) -> bool | None:
    # Two bytes for each instruction, the cache entries included.
    places = list(code.co_positions())
    place = places[offset // 2]
    # Until Python 3.12 the jumps of a condition have the place of the whole statement; later ones ask for the truth at that of the expression.
    jumps = [
        instruction.offset
        for instruction in dis.get_instructions(code)
        if "IF_" in instruction.opname and places[instruction.offset // 2] == place
    ]
    return answer_at("".join(linecache.getlines(code.co_filename)), place, sum(jump < offset for jump in jumps))


def answer_at(source: str, place: Place, number: int = 0) -> bool | None:
    """The answer for the expression at `place` (first and last line, first and last column in bytes) of a program, or for the operand `number` of the
    condition of the statement there; None if its value decides no check."""
    nodes, parents = _nodes(source)
    node = nodes.get(place)
    if isinstance(node, ast.If | ast.Assert):
        node = next(itertools.islice(_operands(node.test), number, None), None)
    if not isinstance(node, ast.expr):
        return None
    raises_if_true, raises_if_false = _raising(node, (True, False), parents)
    return None if raises_if_true == raises_if_false else raises_if_false


def _operands(test: ast.expr) -> Iterator[ast.expr]:
    """The expressions whose truth a condition asks for, from left to right."""
    if isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _operands(value)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _operands(test.operand)
    else:
        # A chain of comparisons asks once for each of them.
        yield from itertools.repeat(test, len(test.ops) if isinstance(test, ast.Compare) else 1)


@functools.lru_cache(maxsize=64)
def _nodes(source: str) -> tuple[dict[Place, ast.expr | ast.stmt], dict[ast.AST, ast.AST]]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return {}, {}
    nodes: dict[Place, ast.expr | ast.stmt] = {}
    parents: dict[ast.AST, ast.AST] = {}
    for node in ast.walk(tree):
        parents |= dict.fromkeys(ast.iter_child_nodes(node), node)
        if isinstance(node, ast.expr | ast.stmt):
            # Of several with one place the outermost is met first.
            nodes.setdefault((node.lineno, node.end_lineno, node.col_offset, node.end_col_offset), node)
    return nodes, parents


def _raising(node: ast.expr, outcomes: Outcomes, parents: dict[ast.AST, ast.AST]) -> tuple[bool, bool]:
    """Whether the program raises an error where what is read is true, and where it is false; `outcomes` are those of `node`."""
    above = parents.get(node)
    if isinstance(above, ast.Assert) and node is above.test:
        return outcomes[0] is False, outcomes[1] is False
    if isinstance(above, ast.If) and node is above.test:
        after = _behind(above, parents)
        by = {True: _raises([*above.body, *after]), False: _raises([*above.orelse, *after]), None: False}
        return by[outcomes[0]], by[outcomes[1]]
    follows = _follows(node, above, parents)
    if follows is None:
        return False, False
    if isinstance(above, ast.UnaryOp):
        outcomes = _opposite(outcomes[0]), _opposite(outcomes[1])
    elif isinstance(above, ast.BoolOp):
        deciding = isinstance(above.op, ast.Or)
        outcomes = _if_deciding(outcomes[0], deciding), _if_deciding(outcomes[1], deciding)
    return _raising(follows, outcomes, parents)


def _follows(node: ast.expr, above: ast.AST | None, parents: dict[ast.AST, ast.AST]) -> ast.expr | None:
    """The expression whose truth is that of `node`, or its opposite, or may be decided by it."""
    is_not = isinstance(above, ast.UnaryOp) and isinstance(above.op, ast.Not)
    is_bool = (
        isinstance(above, ast.Call)
        and isinstance(above.func, ast.Name)
        and above.func.id == "bool"
        and node in above.args
    )
    if isinstance(above, ast.expr) and (is_not or is_bool or isinstance(above, ast.BoolOp | ast.NamedExpr)):
        return above
    if isinstance(above, ast.Assign) and len(above.targets) == 1 and isinstance(above.targets[0], ast.Name):
        return _first_use(above.targets[0].id, above, parents)
    return None


def _if_deciding(value: bool | None, deciding: bool) -> bool | None:
    return value if value is deciding else None


def _opposite(value: bool | None) -> bool | None:
    return None if value is None else not value


def _first_use(name: str, assigned: ast.Assign, parents: dict[ast.AST, ast.AST]) -> ast.Name | None:
    """Where the condition of an `if` or an `assert` of the same block first uses what a name was assigned to."""
    for statement in _behind(assigned, parents):
        uses = [each for each in ast.walk(statement) if isinstance(each, ast.Name) and each.id == name]
        if uses:
            test = statement.test if isinstance(statement, ast.If | ast.Assert) else None
            return next((use for use in uses if test is not None and use in ast.walk(test)), None)
    return None


def _behind(statement: ast.stmt, parents: dict[ast.AST, ast.AST]) -> list[ast.stmt]:
    """The statements that follow one in its block."""
    around = parents[statement]
    blocks = (getattr(around, field, None) for field in ("body", "orelse", "finalbody"))
    block: list[ast.stmt] = next((each for each in blocks if isinstance(each, list) and statement in each), [])
    return block[block.index(statement) + 1 :] if block else []


def _raises(block: Sequence[ast.stmt]) -> bool:
    """Whether a block raises an error or ends the program, whatever its values."""
    for statement in block:
        if isinstance(statement, ast.Raise):
            return True
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            if ast.unparse(statement.value.func) in _EXITS:
                return True
        elif (isinstance(statement, ast.With) and _raises(statement.body)) or (
            isinstance(statement, ast.If) and _raises(statement.body) and _raises(statement.orelse)
        ):
            return True
        if any(isinstance(each, _LEAVES) for each in ast.walk(statement)):
            return False
    return False
