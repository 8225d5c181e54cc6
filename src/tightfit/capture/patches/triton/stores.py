"""Which parameters a Triton kernel reads from and writes to, found in its source without compiling it.

Pointers are followed from the parameters through assignments, arithmetic and calls, in no order: a name stands for every pointer that it is ever
assigned. What is loaded from memory is a value and no pointer, unless the kernel casts values to pointers. Where the source leaves a doubt a
parameter counts as written, so that the answer has all that are written to, and may have more.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

# Parts of the names of triton.language's functions, and of the methods of its tensor descriptors, that access memory.
_STORES = ("store", "atomic", "scatter", "copy", "tensormap")
_LOADS = ("load", "gather", "atomic", "copy")
_RETURN_VALUES = ("load", "atomic")
# These run code of the kernel's author on what they are given, which may be addresses.
_OPAQUE = ("inline_asm_elementwise", "extern_elementwise", "map_elementwise")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Accesses:
    """Names of parameters. `is_known` is false where the source could not be followed: then any parameter may be written to."""

    read: frozenset[str]
    written: frozenset[str]
    is_known: bool


_UNKNOWN = Accesses(read=frozenset(), written=frozenset(), is_known=False)


def accesses(kernel: Any, known: dict[int, Accesses]) -> Accesses:
    """The parameters that a `JITFunction` reads from and writes to, also through the functions that it calls.

    `known` has what was found before by the id of the kernel, and is added to.
    """
    found = known.get(id(kernel))
    if found is None:
        # A function that calls itself has not been followed when the inner call is.
        known[id(kernel)] = _UNKNOWN
        found = known[id(kernel)] = _followed(kernel, known)
    return found


def _followed(kernel: Any, known: dict[int, Accesses]) -> Accesses:
    function = kernel.fn
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return _UNKNOWN
    definition = tree.body[0]
    # Gluon's kernels address memory in ways of their own.
    if not isinstance(definition, ast.FunctionDef) or "gluon" in type(kernel).__name__.lower():
        return _UNKNOWN
    scope = {**vars(builtins), **function.__globals__, **inspect.getclosurevars(function).nonlocals}
    return _Reader(definition, scope, known).read()


def _assignments(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The targets and values of all assignments, of loops and contexts too."""
    for node in nodes:
        if isinstance(node, ast.Assign):
            yield from ((target, node.value) for target in node.targets)
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
            yield node.target, node.value
        elif isinstance(node, ast.For | ast.comprehension):
            yield node.target, node.iter
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            yield node.optional_vars, node.context_expr


class _Reader:
    """Follows pointers through one function."""

    def __init__(self, definition: ast.FunctionDef, scope: Mapping[str, Any], known: dict[int, Accesses]) -> None:
        given = definition.args
        self._parameters = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        self._has_rest = given.vararg is not None or given.kwarg is not None
        # Without decorators, which run on the host.
        self._nodes = [node for statement in definition.body for node in ast.walk(statement)]
        self._scope = scope
        self._known = known
        self._sources: dict[str, frozenset[str]] = {name: frozenset({name}) for name in self._parameters}

    def read(self) -> Accesses:
        """What the function accesses."""
        assignments = list(_assignments(self._nodes))
        # A name of the function's own is none of its module's.
        for target, _ in assignments:
            for node in ast.walk(target):
                if isinstance(node, ast.Name):
                    self._sources.setdefault(node.id, frozenset())
        while self._assign(assignments):
            pass
        read: set[str] = set()
        written: set[str] = set()
        if self._has_rest or self._makes_pointers():
            return _UNKNOWN
        for node in self._nodes:
            if isinstance(node, ast.Call) and not self._call(node, read, written):
                return _UNKNOWN
        mine = set(self._parameters)
        return Accesses(read=frozenset(read & mine), written=frozenset(written & mine), is_known=True)

    def _makes_pointers(self) -> bool:
        """Whether values that were loaded become pointers: by a pointer type, or by the type of another pointer."""
        for node in self._nodes:
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if name == "pointer_type":
                return True
            if isinstance(node, ast.Call) and _name(node) in ("to", "cast"):
                given = (*node.args, *(keyword.value for keyword in node.keywords))
                if any(isinstance(a, ast.Attribute) and a.attr == "dtype" and self._of(a.value) for a in given):
                    return True
        return False

    def _assign(self, assignments: list[tuple[ast.expr, ast.expr]]) -> bool:
        changed = False
        for target, value in assignments:
            sources = self._of(value)
            for node in ast.walk(target):
                if isinstance(node, ast.Name) and not sources <= self._sources[node.id]:
                    self._sources[node.id] |= sources
                    changed = True
        return changed

    def _of(self, *expressions: ast.AST) -> frozenset[str]:
        """The parameters whose memory one of the expressions may point into."""
        return frozenset().union(*map(self._of_one, expressions))

    def _of_one(self, expression: ast.AST) -> frozenset[str]:
        if isinstance(expression, ast.Name):
            return self._sources.get(expression.id, frozenset())
        if isinstance(expression, ast.Compare):
            return frozenset()
        if isinstance(expression, ast.Call) and _accesses(expression, _RETURN_VALUES) and not self._inner(expression):
            return frozenset()
        return self._of(*ast.iter_child_nodes(expression))

    def _call(self, call: ast.Call, read: set[str], written: set[str]) -> bool:
        """Adds what a call reads and writes; whether it could be followed."""
        inner = self._inner(call)
        if inner is not None:
            return self._inner_call(inner, call, read, written)
        if _accesses(call, (*_STORES, *_LOADS)):
            target = self._target(call)
            written |= target if _accesses(call, _STORES) else frozenset()
            read |= target if _accesses(call, _LOADS) else frozenset()
        elif not _is_harmless(call, self._resolved(call.func)):
            given = self._of(call.func, *call.args, *(keyword.value for keyword in call.keywords))
            written |= given
            read |= given
        return True

    def _target(self, call: ast.Call) -> frozenset[str]:
        """Where an access goes: the first argument of a function, or the descriptor whose method it is. A copy goes to any of its arguments."""
        if _accesses(call, ("copy", "tensormap")):
            return self._of(call.func, *call.args, *(keyword.value for keyword in call.keywords))
        named = [k.value for k in call.keywords if k.arg in (None, "pointer", "ptr", "desc")]
        return self._of(call.func, *call.args[:1], *named)

    def _inner(self, call: ast.Call) -> Any:
        """The program's own function for the card that a call is of, or None."""
        called = self._resolved(call.func)
        is_own = called is not None and hasattr(called, "fn") and hasattr(called, "arg_names")
        return called if is_own and not _is_of(called, "triton") else None

    def _inner_call(self, called: Any, call: ast.Call, read: set[str], written: set[str]) -> bool:
        inner = accesses(called, self._known)
        is_spread = any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords)
        if not inner.is_known or is_spread:
            return False
        pairs = [*zip(called.arg_names, call.args, strict=False), *((k.arg, k.value) for k in call.keywords)]
        for name, value in pairs:
            read |= self._of(value) if name in inner.read else frozenset()
            written |= self._of(value) if name in inner.written else frozenset()
        return True

    def _resolved(self, function: ast.expr) -> Any:
        """What is called, if it is a name of the module or in one; None for a local name or a method of a value."""
        if isinstance(function, ast.Name):
            return None if function.id in self._sources else self._scope.get(function.id)
        if isinstance(function, ast.Attribute):
            owner = self._resolved(function.value)
            return getattr(owner, function.attr, None) if isinstance(owner, ModuleType) else None
        return None


def _name(call: ast.Call) -> str:
    function = call.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _accesses(call: ast.Call, parts: Iterable[str]) -> bool:
    return any(part in _name(call) for part in parts)


def _is_harmless(call: ast.Call, called: Any) -> bool:
    """Whether a call, of `called` where that is known, accesses no memory: one of triton's functions, a builtin, or a method of its values."""
    if _name(call) in _OPAQUE:
        return False
    if called is None:
        language = sys.modules["triton.language"]
        is_method = isinstance(call.func, ast.Attribute)
        return is_method and any(hasattr(kind, _name(call)) for kind in (language.tensor, language.dtype))
    return _is_of(called, "triton") or _is_of(called, "builtins")


def _is_of(value: Any, package: str) -> bool:
    home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
    return home.partition(".")[0] == package
