"""Statements of a program that keep a tensor of every step: `total += loss`, `losses.append(loss)`, `self.average = 0.9 * self.average + 0.1 * loss`.

A history shows which lines allocate what is never freed, but not which name holds it; the source does, as far as names tell. Starting from what the
growing lines assign, names are followed through the assignments of their function to a sum or a container that outlives the step.
"""

import ast
import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tightfit.analysis.source.carried_values import Carried, carries
from tightfit.analysis.source.scopes_of_source import (
    Scope,
    begins_anew,
    bound_names,
    lines_of,
    scope_at,
    scopes_of,
    text_of,
)

# A script is shorter; a recording names files, and this opens them.
_MAX_SOURCE_BYTES = 2**20
_MAX_TEXT = 72
_ADDS = frozenset({"append", "add", "extend", "insert", "appendleft"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Accumulation:
    """A statement that keeps a tensor of each step. `line` is `FILE:LINE`, `text` the statement, `value` the name of what it adds, if that has one.

    `has_graph`: the tensor carries its graph, as far as the source tells. `is_container`: each tensor stays one of its own, as in a list.
    """

    line: str
    text: str
    value: str
    has_graph: bool
    is_container: bool


ADVICE_ON_GROWTH = (
    "if a sum or a list holds a loss or an output of every step, store `.item()` or `.detach().cpu()` of it instead"
)
"""Where no source says what holds it."""


def advice_on_accumulation(found: Accumulation) -> str:
    """What to write instead, in words."""
    item, detach, cpu, kept = (
        f"`{found.value}{call}`" if found.value else f"`{call}` of the tensor"
        for call in (".item()", ".detach()", ".cpu()", ".detach().cpu()")
    )
    if not found.has_graph:
        return f"`{found.text}` keeps a tensor of every step: {cpu}, or drop it when it is no longer needed"
    if found.is_container:
        return f"`{found.text}` keeps a tensor of every step, and its graph if it has one: {item} or {kept}"
    return f"`{found.text}` retains the graph of every step: {detach}, or {item}, which waits for the GPU"


def accumulations_from(lines: Iterable[tuple[str, str]], others: Iterable[str] = ()) -> tuple[Accumulation, ...]:
    """The statements that keep what is allocated at `lines`, each `FILE:LINE` with the name of its function (empty where not known).

    Where the functions of these lines say nothing (a model's own forward pass), those that call `backward()` and have run, as some of `lines` and `others`
    are in them, are asked what they keep of the loss. Empty where no file can be read, or none says it. Files are those of now, which may not be those that ran.
    """
    by_file: dict[str, list[tuple[int, str]]] = {}
    lines, others = list(lines), list(others)
    for place, function in lines:
        file, _, number = place.rpartition(":")
        if number.isdigit():
            by_file.setdefault(file, []).append((int(number), function))
    sources = {file: _source(file) for file in by_file}
    scopes = {file: _scopes_of(source, by_file[file]) for file, source in sources.items() if source is not None}
    found = _fewest_resets(
        one for file, own in scopes.items() for scope, growing in own for one in _of_scope(file, scope, growing)
    )
    if found:
        return found
    # A file that was edited since it ran has none of the functions, and its loop may be another one, too.
    files = [file for file, own in scopes.items() if own]
    files += [file for place in others if (file := place.rpartition(":")[0]) not in by_file]
    ran: dict[str, set[int]] = {}
    for place in (*others, *(place for place, _ in lines)):
        file, _, number = place.rpartition(":")
        ran.setdefault(file, set()).update([int(number)] if number.isdigit() else [])
    return _fewest_resets(
        one
        for file in dict.fromkeys(files)
        if (source := sources.get(file) or _source(file)) is not None
        for scope in _scopes_that_ran(source, ran[file])
        for one in _of_loss(file, scope)
    )


def _fewest_resets(found: Iterable[tuple[int, Accumulation]]) -> tuple[Accumulation, ...]:
    """Those that the fewest loops begin anew: a sum that is reset in a loop is held for less long, and may be a part of one that never is.

    Where one retains a graph, those that keep a tensor alone are no cause of what else grows.
    """
    rows = {one.line: (resets, one) for resets, one in found}
    if any(one.has_graph for _, one in rows.values()):
        rows = {line: row for line, row in rows.items() if row[1].has_graph}
    fewest = min((resets for resets, _ in rows.values()), default=0)
    return tuple(one for resets, one in rows.values() if resets == fewest)


def _source(file: str) -> ast.Module | None:
    """The parsed file; None where there is no such source, or one that this Python cannot parse."""
    if not file.endswith(".py"):
        return None
    try:
        # Opened only if it is a plain file: what a recording names may be a device or a pipe.
        if not Path(file).is_file() or os.stat(file).st_size > _MAX_SOURCE_BYTES:
            return None
        return ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def _scopes_of(tree: ast.Module, numbers: Sequence[tuple[int, str]]) -> list[tuple[Scope, set[int]]]:
    """The functions around the lines, each with its lines."""
    found: dict[int, tuple[Scope, set[int]]] = {}
    for number, function in numbers:
        scope = scope_at(tree, number)
        # A file that was edited since has other functions at its lines; a comprehension's name is not that of the function around it.
        if not function or scope.name == function or function.startswith("<"):
            found.setdefault(id(scope.node), (scope, set()))[1].add(number)
    return list(found.values())


def _scopes_that_ran(tree: ast.Module, numbers: Iterable[int]) -> list[Scope]:
    """The functions that these lines are in, and those around them: another one of the file may keep what it never did here."""
    found = {id(scope_at(tree, number).node) for number in numbers}
    return [
        scope
        for scope in scopes_of(tree)
        if (found & {id(node) for node in ast.walk(scope.node)} and not scope.is_module) or id(scope.node) in found
    ]


def _of_scope(file: str, scope: Scope, growing: set[int]) -> Iterator[tuple[int, Accumulation]]:
    """What the function keeps of that which its growing lines allocate."""
    allocating = [one for one in scope.statements if growing & set(lines_of(one))]
    seeds: dict[Carried, set[str]] = {"tensor": set(), "graph": set()}
    for statement in allocating:
        value = getattr(statement, "value", None)
        # Whatever such a line reads, what it computes is new: `scores = query @ key` is allocated there.
        read = set() if value is None else {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
        for what in seeds:
            if value is None or carries(value, read, what, calls=True):
                seeds[what] |= bound_names(statement)
    yield from _kept(file, scope, seeds, allocating)


def _of_loss(file: str, scope: Scope) -> Iterator[tuple[int, Accumulation]]:
    """What the function keeps of the losses that it calls `backward()` of, `loss.backward()` or `accelerator.backward(loss)`."""
    losses = {
        node.id
        for call in scope.calls("backward")
        for part in (call.func, *call.args)
        for node in ast.walk(part)
        if isinstance(node, ast.Name)
    }
    # Only what an assignment binds is a loss; `accelerator` and `scaler` are none of the loop's.
    losses &= {name for one in scope.statements if scope.loops_around(one) for name in bound_names(one)}
    yield from _kept(file, scope, {"tensor": set(), "graph": losses}, ())


def _kept(
    file: str, scope: Scope, seeds: Mapping[Carried, set[str]], allocating: Sequence[ast.stmt]
) -> Iterator[tuple[int, Accumulation]]:
    names = {what: _followed(scope, found, what) for what, found in seeds.items()}
    for statement in scope.statements:
        added = _added(statement)
        if added is None:
            continue
        holder, value, is_container = added
        # A call in a line that grows returns what grows: `losses.append(criterion(model(x), y))`.
        calls = any(statement is one for one in allocating)
        own = {text_of(holder)}
        has_graph = carries(value, names["graph"] - own, "graph", calls=calls)
        # `.cpu()` alone copies the value, and its graph still holds what it was computed from.
        if not has_graph and not carries(value, names["tensor"] - own, "tensor", calls=calls):
            continue
        resets = _resets(scope, statement, holder, is_container=is_container)
        # A sum of tensors without a graph is one tensor, however many steps there are.
        if (is_container or has_graph) and resets is not None:
            text = ast.unparse(statement)
            yield (
                resets,
                Accumulation(
                    line=f"{file}:{statement.lineno}",
                    text=text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…",
                    value=_name_of(value, (names["tensor"] | names["graph"]) - own),
                    has_graph=has_graph,
                    is_container=is_container,
                ),
            )


def _name_of(value: ast.expr, names: set[str]) -> str:
    """The name of the tensor that is added, empty where it has none or there are several."""
    found = {node.id for node in ast.walk(value) if isinstance(node, ast.Name) and node.id in names}
    is_plain = all(
        isinstance(node, ast.Name | ast.BinOp | ast.operator | ast.Constant | ast.expr_context)
        for node in ast.walk(value)
    )
    return found.pop() if len(found) == 1 and is_plain else ""


def _followed(scope: Scope, names: set[str], what: Carried) -> set[str]:
    """`names`, and those that are bound to something that is computed from them."""
    names = set(names)
    while True:
        more = {
            name
            for statement in scope.statements
            if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None
            if carries(statement.value, names, what)
            for name in bound_names(statement)
        } - names
        if not more:
            return names
        names |= more


def _added(statement: ast.stmt) -> tuple[ast.expr, ast.expr, bool] | None:
    """What holds, what it is given, and whether it is a container: of a statement that adds to something; None of any other."""
    match statement:
        case ast.AugAssign(op=ast.Add() | ast.Sub() | ast.BitOr()):
            return (
                statement.target,
                statement.value,
                isinstance(statement.value, ast.List | ast.Tuple | ast.Set | ast.Dict),
            )
        case ast.Expr(value=ast.Call(func=ast.Attribute() as method, args=[*_, value])) if method.attr in _ADDS:
            return method.value, value, True
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="add_") as method, args=[value, *_])):
            return method.value, value, False
        case ast.Assign(targets=[ast.Subscript(slice=key) as target]) if not isinstance(key, ast.Constant):
            return target.value, statement.value, True
        case ast.Assign(targets=[ast.Name() | ast.Attribute() as target]) if _mentions(statement.value, target):
            return target, statement.value, isinstance(statement.value, ast.List | ast.Tuple | ast.Set | ast.Dict)
        case _:
            return None


def _mentions(value: ast.expr, target: ast.expr) -> bool:
    text = text_of(target)
    return any(isinstance(node, ast.Name | ast.Attribute) and text_of(node) == text for node in ast.walk(value))


def _resets(scope: Scope, statement: ast.stmt, holder: ast.expr, *, is_container: bool) -> int | None:
    """How many loops around the statement begin what holds anew; None where each step does, or where it does not outlive the function."""
    root = _root(holder)
    names = {text_of(holder), root}
    loops = scope.loops_around(statement)
    step = next((loop for loop in loops if scope.has_step(loop)), loops[-1] if loops and scope.is_module else None)
    if step is None:
        # No loop over steps is here, so it has to be held by something from outside: an attribute, a global, or a list that is an argument.
        is_outer = (
            text_of(holder) != root or root in scope.outer_names or (is_container and root not in scope.local_names)
        )
        return 0 if is_outer and not any(begins_anew(one, names) for one in scope.statements) else None
    resetting = [scope.begins_anew_in(loop, names) for loop in loops]
    return None if any(resetting[: loops.index(step) + 1]) else sum(resetting)


def _root(expression: ast.expr) -> str:
    """The name that an expression begins with: `self` of `self.losses["train"]`."""
    while isinstance(expression, ast.Attribute | ast.Subscript | ast.Call):
        expression = expression.func if isinstance(expression, ast.Call) else expression.value
    return expression.id if isinstance(expression, ast.Name) else ""
