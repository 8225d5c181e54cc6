"""Whether the backward pass of a function of the program's asks what a saved tensor is: which object, of which class, with which attributes.

Without hooks for saved tensors autograd gives a function the very tensors that it saved; with hooks (checkpoints, offload) it gives new ones of the same
values. Which of the two it is can be seen by `is`, `id`, `type`, `isinstance(..., Parameter)`, `getattr` or an attribute. The code of the backward pass is read for
that, with the functions that it calls.
"""

import functools
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tightfit.effects.bytecode.instructions import Instruction, instructions_of
from tightfit.effects.users_code import is_users_file

_ASKING = frozenset(["type", "id", "hasattr", "getattr", "setattr", "vars"])
_OF_TENSORS = frozenset(dir(torch.Tensor)) - {"grad", "register_hook", "register_post_accumulate_grad_hook"}
_MAX_DEPTH = 4


def question_of(function: Any) -> str:
    """For the class of a function that has a tensor saved, None for an operator: the line where its backward pass asks what the tensor is, or nothing."""
    backward = getattr(function, "backward", None)
    return question_in(backward) if isinstance(backward, types.FunctionType) else ""


def question_in(backward: types.FunctionType) -> str:
    """The line where a backward function, or one that it calls, asks what a saved tensor is, or nothing."""
    names = saved_names(backward.__code__)
    return next(
        (
            line
            for function, depth in called(backward)
            for line in _questions(function.__code__, names if not depth else frozenset())
        ),
        "",
    )


def told(question: str) -> str:
    """Why a region with such a function is refused."""
    return (
        "has an autograd function whose backward checks the identity, class or attributes of a saved tensor (at "
        f"{question}), and saved-tensor hooks return another object"
    )


def called(function: types.FunctionType) -> Iterator[tuple[types.FunctionType, int]]:
    """The function and those of the program's own that it names; libraries' helpers ask for classes for other reasons."""
    # By identity: functions that are written alike have equal code, and other globals in another file.
    seen: set[int] = set()
    waiting = [(function, 0)]
    while waiting:
        one, depth = waiting.pop()
        if id(one.__code__) in seen:
            continue
        seen.add(id(one.__code__))
        yield one, depth
        if depth < _MAX_DEPTH:
            waiting += [(other, depth + 1) for other in _functions_named(one)]


def _functions_named(function: types.FunctionType) -> Iterator[types.FunctionType]:
    names = set(function.__code__.co_names)
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_full(cell)]
    for value in (*(function.__globals__[name] for name in names if name in function.__globals__), *cells):
        inner = value.__func__ if isinstance(value, types.MethodType) else value
        if isinstance(inner, types.FunctionType) and is_users_file(inner.__code__.co_filename):
            yield inner


def _is_full(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


@functools.lru_cache(maxsize=1024)
def saved_names(code: types.CodeType) -> frozenset[str]:
    """The variables that are given saved tensors: what is stored behind each read of `saved_tensors`."""
    instructions = list(instructions_of(code))
    found = set()
    for position, each in enumerate(instructions):
        if each.argval != "saved_tensors":
            continue
        for later in instructions[position + 1 :]:
            if later.opname == "STORE_FAST":
                found.add(later.argval)
            elif later.opname not in (
                "UNPACK_SEQUENCE",
                "UNPACK_EX",
                "LOAD_CONST",
                "BINARY_SUBSCR",
                "BINARY_SLICE",
                "BUILD_SLICE",
            ):
                break
    return frozenset(found)


# By code, which does not keep what the program has in its globals.
@functools.lru_cache(maxsize=1024)
def _questions(code: types.CodeType, saved: frozenset[str]) -> tuple[str, ...]:
    return tuple(_asked(code, saved))


def _asked(code: types.CodeType, saved: frozenset[str]) -> Iterator[str]:
    names = set(code.co_names)
    before: Instruction | None = None
    for each in instructions_of(code):
        is_asked = (
            (each.opname == "IS_OP" and before is not None and before.opname != "LOAD_CONST")
            or (each.opname in ("LOAD_GLOBAL", "LOAD_NAME") and each.argval in _ASKING)
            or (each.argval == "isinstance" and "Parameter" in names)
            or (
                each.opname in ("LOAD_ATTR", "STORE_ATTR")
                and before is not None
                and before.opname == "LOAD_FAST"
                and before.argval in saved
                and (each.opname == "STORE_ATTR" or each.argval not in _OF_TENSORS)
            )
        )
        if is_asked:
            yield f"{Path(code.co_filename).name}:{each.line}"
        before = each
