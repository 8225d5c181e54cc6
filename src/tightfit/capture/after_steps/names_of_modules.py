"""Which names of a program stand for modules, read from its source: what it calls `parameters` on, and what such a name is assigned to.

A name too many does no harm where nothing calls it, so other names of one module, wrappers of it and containers with it are all taken.
"""

import ast
from collections.abc import Iterable, Iterator

from tightfit.capture.after_steps.rewriting import called

_OF_MODULES = frozenset(
    {"parameters", "named_parameters", "eval", "modules", "named_modules", "children", "named_children"}
)
# Of optimizers and tensors too, which are never called.
_OF_OTHERS = frozenset(
    {"zero_grad", "train", "state_dict", "load_state_dict", "requires_grad_", "to", "cuda", "half", "bfloat16", "float"}
)
# They return the module that they are called on.
_RETURN_IT = frozenset(
    {"train", "eval", "requires_grad_", "to", "cuda", "cpu", "half", "bfloat16", "float", "double", "compile"}
)
_INSIDE = frozenset({"module", "_orig_mod", "model", "base_model"})
_WRAPPERS = frozenset(
    {"deepcopy", "copy", "compile", "script", "trace", "prepare", "prepare_model", "unwrap", "unwrap_model"}
    | {"get_peft_model", "fully_shard", "setup", "setup_module", "initialize", "partial", "merge_and_unload"}
)
_ITERATORS = frozenset({"values", "items", "enumerate", "zip", "list", "tuple", "reversed", "sorted", "iter"})
_MAX_ROUNDS = 8
"""A longer chain of assignments ends in names that are not known."""


def last_name(node: ast.AST) -> str:
    """`step` for `step`, `self.step` and `counts["step"]`."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def names_of_modules(trees: Iterable[ast.Module]) -> tuple[set[str], set[str]]:
    """The last part of each name (`self.model`: `model`) that stands for a module, or for a container of modules; and of each that does if it is called."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    classes = {node.name for node in nodes if isinstance(node, ast.ClassDef) and _has_forward(node)}
    bindings = [(target, value) for node in nodes for target, value in _bindings(node, functions)]
    sure, likely = (_Names(classes, _with_methods(nodes, of)) for of in (_OF_MODULES, _OF_MODULES | _OF_OTHERS))
    for names in (sure, likely):
        for _ in range(_MAX_ROUNDS):
            before = len(names.found)
            for target, value in bindings:
                names.bind(target, value)
            if len(names.found) == before:
                break
    return sure.found, likely.found


def _with_methods(nodes: Iterable[ast.AST], methods: frozenset[str]) -> set[str]:
    """The names that one of these methods is called on."""
    return {
        last_name(node.func.value)
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in methods
    }


class _Names:
    """The names that are known so far, and the program's own classes of modules."""

    def __init__(self, classes: set[str], found: set[str]) -> None:
        self._classes = classes
        self.found = found - {"", "self"}

    def bind(self, target: ast.AST, value: ast.AST) -> None:
        """Notes what `target = value` makes a name of a module."""
        if isinstance(target, ast.Tuple | ast.List):
            values = self._parts(value, len(target.elts))
            for each, part in zip(target.elts, values, strict=True):
                self.bind(each, part)
        elif self._is_module(value) and (name := last_name(target)) != "self":
            self.found |= {name} - {""}

    def _parts(self, value: ast.AST, length: int) -> list[ast.AST]:
        """What each of so many targets is assigned; a call returns its arguments in order (`accelerator.prepare(model, optimizer)`)."""
        given = value.elts if isinstance(value, ast.Tuple | ast.List) else []
        if isinstance(value, ast.Call) and called(value) in _WRAPPERS:
            given = value.args
        # `for name, model in models.items()`: the last one.
        return list(given) if len(given) == length else [*[ast.Constant(None)] * (length - 1), value]

    def _is_module(self, value: ast.AST) -> bool:
        match value:
            case ast.Call():
                return self._returns_module(value)
            case ast.Attribute() if value.attr in _INSIDE:
                return value.attr in self.found or self._is_module(value.value)
            case ast.Name() | ast.Attribute() | ast.Subscript():
                return last_name(value) in self.found
        return any(map(self._is_module, _values_of(value)))

    def _returns_module(self, call: ast.Call) -> bool:
        name = called(call)
        if name in self._classes:
            return True
        if (
            isinstance(call.func, ast.Attribute)
            and name in _RETURN_IT | _ITERATORS
            and self._is_module(call.func.value)
        ):
            return True
        # A class that is given a module (`AveragedModel(model)`) wraps it.
        wraps = name in _WRAPPERS | _ITERATORS or name[:1].isupper()
        return wraps and any(map(self._is_module, call.args))


def _values_of(expression: ast.AST) -> list[ast.expr]:
    """Those that an expression chooses from, or puts together."""
    match expression:
        case ast.IfExp():
            return [expression.body, expression.orelse]
        case ast.BoolOp() | ast.Dict():
            return expression.values
        case ast.Tuple() | ast.List():
            return expression.elts
        case ast.ListComp() | ast.GeneratorExp():
            return [expression.elt]
    return []


def _has_forward(node: ast.ClassDef) -> bool:
    return any(isinstance(each, ast.FunctionDef) and each.name in {"forward", "__call__"} for each in node.body)


def _bindings(
    node: ast.AST, functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef]
) -> Iterator[tuple[ast.AST, ast.AST]]:
    """The assignments that a node makes: its target and what it is assigned; a call of the program's own function assigns its parameters."""
    match node:
        case ast.Assign():
            yield from ((target, node.value) for target in node.targets)
        case ast.AnnAssign(value=ast.expr() as value):
            yield node.target, value
        case ast.NamedExpr():
            yield node.target, node.value
        case ast.For() | ast.AsyncFor() | ast.comprehension():
            yield node.target, node.iter
        case ast.withitem(optional_vars=ast.expr() as target):
            yield target, node.context_expr
        case ast.Call() if (function := functions.get(called(node))) is not None:
            parameters = [*function.args.posonlyargs, *function.args.args]
            if parameters and parameters[0].arg in {"self", "cls"}:
                parameters = parameters[1:]
            yield from ((ast.Name(each.arg), value) for each, value in zip(parameters, node.args, strict=False))
            yield from ((ast.Name(each.arg), each.value) for each in node.keywords if each.arg)
