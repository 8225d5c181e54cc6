"""Code that has gradients computed of more weights from then on: `requires_grad_()`, `p.requires_grad = True`, `backbone.unfreeze()`.

Read from the source: what a loop around training steps unfreezes in each of its turns (`unfreeze(layers=epoch)`) has trained less in its first turn.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence, Set

from tightfit.capture.after_steps.rewriting import called


def unfreezes(call: ast.Call) -> bool:
    """Whether a method has gradients computed from then on: `requires_grad_()`, `backbone.unfreeze()`."""
    if not isinstance(call.func, ast.Attribute):
        return False
    if call.func.attr == "requires_grad_":
        given = [*call.args, *(each.value for each in call.keywords)]
        return not any(isinstance(each, ast.Constant) and not each.value for each in given)
    return re.fullmatch("unfreeze(_.*)?", call.func.attr) is not None


def is_unfreezing(node: ast.Assign) -> bool:
    """Of the forms `p.requires_grad = True` and `p.requires_grad = name in chosen`."""
    is_off = isinstance(node.value, ast.Constant) and not node.value.value
    return not is_off and any(isinstance(each, ast.Attribute) and each.attr == "requires_grad" for each in node.targets)


def unfreezing(node: ast.AST, without: Set[int], functions: Mapping[str, Sequence[ast.AST]]) -> Iterator[ast.expr]:
    """What unfreezes weights in each turn of the loop `node`: not on a condition, nor in the nodes whose ids are in `without`.

    `functions` are those of the program by name.
    """
    for child in ast.iter_child_nodes(node):
        if id(child) in without or isinstance(child, ast.If | ast.FunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(child, ast.Assign) and is_unfreezing(child):
            # In words of its own: it is no expression.
            yield ast.copy_location(ast.Name(ast.unparse(child)), child)
        elif isinstance(child, ast.Call) and (unfreezes(child) or _is_for_it(functions.get(called(child), ()))):
            yield child
        else:
            yield from unfreezing(child, without, functions)


def _is_for_it(functions: Sequence[ast.AST]) -> bool:
    """Whether a function unfreezes weights and trains nothing."""
    nodes = [node for function in functions for node in ast.walk(function)]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    if any(called(call) in {"backward", "step"} for call in calls):
        return False
    return any(map(unfreezes, calls)) or any(isinstance(node, ast.Assign) and is_unfreezing(node) for node in nodes)
