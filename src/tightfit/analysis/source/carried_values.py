"""Whether the value of an expression in a program's source may carry a tensor, or the graph of one, by the names that do.

`loss`, `outputs.loss`, `[loss, x]` and `loss / 4` carry the graph of `loss`. `loss.detach()` and `loss.view(-1)` carry its storage, `loss / 4` one of its own, and
`loss.item()` nothing.
"""

import ast
from collections.abc import Set
from typing import Literal

Carried = Literal["graph", "tensor"]

# Methods and attributes whose result has no graph; those of the second group are no tensors on the GPU either.
_ENDS_GRAPH = frozenset({"detach", "data", "argmax", "argmin", "detach_"})
_ENDS_TENSOR = frozenset(
    {
        "item",
        "tolist",
        "numpy",
        "shape",
        "size",
        "dim",
        "ndim",
        "numel",
        "dtype",
        "device",
        "backward",
        "keys",
        "is_cuda",
    }
)
_NUMBERS = frozenset(
    {"float", "int", "bool", "str", "len", "repr", "print", "format", "type", "id", "range", "isinstance"}
)
# Methods whose result has the storage of what they are called on, or may have it.
_ALIASES = frozenset(
    {
        "detach",
        "view",
        "view_as",
        "reshape",
        "flatten",
        "squeeze",
        "unsqueeze",
        "expand",
        "expand_as",
        "transpose",
        "permute",
        "t",
        "chunk",
        "split",
    }
    | {
        "narrow",
        "select",
        "unbind",
        "movedim",
        "contiguous",
        "to",
        "cuda",
        "type_as",
        "float",
        "half",
        "bfloat16",
        "values",
        "items",
        "get",
    }
)
_COLLECTIONS = frozenset({"list", "tuple", "dict", "set", "zip", "reversed"})
_HOST_DEVICES = frozenset({"cpu"})


def carries(expression: ast.expr, names: Set[str], what: Carried, *, calls: bool = False) -> bool:
    """Whether the value of `expression` carries `what` of one of `names`: the graph, or the storage of the tensor.

    With `calls`, what is computed in the expression carries it too: its line is known to allocate what is looked for.
    """
    match expression:
        case ast.Name():
            return expression.id in names
        case ast.Attribute():
            if ast.unparse(expression) in names:
                return True
            parts = [] if _ends(expression.attr, what) else [expression.value]
        case ast.Call():
            return _call_carries(expression, names, what, calls=calls)
        case ast.BinOp() | ast.UnaryOp() if what == "tensor" and not calls:
            parts = []
        case ast.Compare() | ast.JoinedStr() | ast.Lambda() | ast.Constant():
            parts = []
        case ast.IfExp():
            parts = [expression.body, expression.orelse]
        case ast.Subscript():
            parts = [expression.value]
        case ast.DictComp() | ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
            return _comprehension_carries(expression, names, what, calls=calls)
        case _:
            parts = [part for part in ast.iter_child_nodes(expression) if isinstance(part, ast.expr)]
    return any(carries(part, names, what, calls=calls) for part in parts)


def _call_carries(call: ast.Call, names: Set[str], what: Carried, *, calls: bool) -> bool:
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    if isinstance(call.func, ast.Attribute):
        return _method_carries(call.func, arguments, names, what, calls=calls)
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    if name in _NUMBERS:
        return False
    # What a function computes from a tensor has its graph, and a storage of its own.
    is_followed = what == "graph" or name in _COLLECTIONS
    return calls or (is_followed and any(carries(one, names, what) for one in arguments))


def _method_carries(
    method: ast.Attribute, arguments: list[ast.expr], names: Set[str], what: Carried, *, calls: bool
) -> bool:
    if _ends(method.attr, what) or (what == "tensor" and _is_host_copy(method.attr, arguments)):
        return False
    if what == "tensor" and not calls:
        return method.attr in _ALIASES and carries(method.value, names, what)
    carried = any(carries(one, names, what, calls=calls) for one in (method.value, *arguments))
    # A cast or a view of something without a graph has none either: `calls` is about what the innermost call returns.
    return carried or (calls and isinstance(method.value, ast.Name | ast.Attribute))


def _comprehension_carries(
    expression: ast.DictComp | ast.ListComp | ast.SetComp | ast.GeneratorExp,
    names: Set[str],
    what: Carried,
    *,
    calls: bool,
) -> bool:
    inner = set(names)
    for generator in expression.generators:
        if carries(generator.iter, inner, what, calls=calls):
            inner |= {node.id for node in ast.walk(generator.target) if isinstance(node, ast.Name)}
    value = expression.value if isinstance(expression, ast.DictComp) else expression.elt
    return carries(value, inner, what, calls=calls)


def _ends(attribute: str, what: Carried) -> bool:
    return attribute in _ENDS_TENSOR or (what == "graph" and attribute in _ENDS_GRAPH)


def _is_host_copy(method: str, arguments: list[ast.expr]) -> bool:
    """`.cpu()` and `.to("cpu")`: the tensor is on the host, and its graph, if it has one, is still there."""
    if method == "cpu":
        return True
    return method == "to" and any(isinstance(one, ast.Constant) and one.value in _HOST_DEVICES for one in arguments)
