"""Whether the program asks if a tensor is of torch's own class by identity, `type(x) is torch.Tensor`, which a stand-in for one is not.

Code is read, not run: what runs when a stand-in is made first, the classes of the model's modules, and what both name. Comparisons of classes by
`==` or `in`, tables by class, and `__class__` are answered as a tensor answers them (`techniques.lazy_tensors.seen_as_tensor`).
"""

import functools
import inspect
import sys
import types
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tightfit.effects.bytecode.instructions import Instruction, instructions_of
from tightfit.effects.users_code import FILES_OF_OURS, FILES_OF_TORCH, is_users_class, is_users_file

_NOT_LOOKED_AT = (FILES_OF_TORCH, FILES_OF_OURS)
_MAX_FUNCTIONS = 4_000
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME")


class ClassQuestion:
    """Asked once for `model`: code does not change much after a first step."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = weakref.ref(model)
        self._is_asked = False

    def line(self) -> str:
        """Where it is asked, as `train.py:12`; empty where it is not, and from the second call on."""
        model = self._model()
        if self._is_asked or model is None:
            return ""
        self._is_asked = True
        walk, frame = _Walk(), sys._getframe(1)
        for module in model.modules():
            walk.instance(module)
        while frame is not None:
            walk.code(frame.f_code, frame.f_globals)
            frame = frame.f_back
        return walk.found


class _Walk:
    """Through functions by what they name; `found` is the first line that asks."""

    def __init__(self) -> None:
        self.found = ""
        self._seen: set[int] = set()

    def code(self, code: types.CodeType, space: Mapping[str, Any]) -> None:
        """A function, those inside of it, and, if it is the user's own, those that they name in `space`, their globals."""
        file = code.co_filename
        if self.found or not self._is_new(code) or file.startswith(_NOT_LOOKED_AT):
            return
        if line := _line_that_asks(code, space):
            self.found = f"{Path(file).name}:{line}"
            return
        names = frozenset(code.co_names)
        if is_users_file(file):
            for name in names:
                self._value(space.get(name), names)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self.code(constant, space)

    def instance(self, value: object) -> None:
        """The methods of an object of the user's class, and the functions that it holds."""
        for kind in type(value).__mro__:
            self._class(kind)
        for held in list(getattr(value, "__dict__", {}).values()):
            if isinstance(held, types.FunctionType | types.MethodType | functools.partial):
                self._value(held, frozenset())

    def _is_new(self, value: object) -> bool:
        if id(value) in self._seen or len(self._seen) >= _MAX_FUNCTIONS:
            return False
        self._seen.add(id(value))
        return True

    def _value(self, value: Any, attributes: frozenset[str]) -> None:
        if isinstance(value, types.MethodType):
            value = value.__func__
        if isinstance(value, functools.partial):
            self._value(value.func, attributes)
        elif isinstance(value, types.FunctionType):
            function = inspect.unwrap(value)
            for each in (value, function):
                if isinstance(each, types.FunctionType) and self._is_users(each):
                    self.code(each.__code__, each.__globals__)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.ModuleType):
            if is_users_file(getattr(value, "__file__", None) or "<frozen"):
                for name in attributes:
                    inner = vars(value).get(name)
                    if not isinstance(inner, types.ModuleType):
                        self._value(inner, attributes)
        elif value is not None and is_users_class(type(value)) and self._is_new(value):
            self.instance(value)

    def _is_users(self, function: types.FunctionType) -> bool:
        return is_users_file(function.__code__.co_filename)

    def _class(self, kind: type) -> None:
        if not is_users_class(kind) or not self._is_new(kind):
            return
        for value in list(vars(kind).values()):
            for function in _functions_of(value):
                if self._is_users(function):
                    self.code(function.__code__, function.__globals__)


def _functions_of(attribute: object) -> Iterator[types.FunctionType]:
    parts: tuple[object, ...] = (attribute,)
    if isinstance(attribute, property):
        parts = (attribute.fget, attribute.fset)
    elif isinstance(attribute, staticmethod | classmethod):
        parts = (attribute.__func__,)
    for part in parts:
        if isinstance(part, types.FunctionType):
            yield part


def _line_that_asks(code: types.CodeType, space: Mapping[str, Any]) -> int:
    """The line of `type(...) is torch.Tensor`, either way around; 0 where there is none."""
    if "type" not in code.co_names:
        return 0
    before: list[Instruction] = []
    asked_at = -1
    for instruction in instructions_of(code):
        if instruction.opname in _LOADS and instruction.argval == "type":
            asked_at = len(before)
        if instruction.opname == "IS_OP" and asked_at >= 0:
            beside = (before[-1], *before[max(0, asked_at - 2) : asked_at])
            if any(_is_torchs_class(each, space) for each in beside):
                return instruction.line
        before.append(instruction)
    return 0


def _is_torchs_class(instruction: Instruction, space: Mapping[str, Any]) -> bool:
    if instruction.opname in _LOADS and instruction.argval in space:
        return space[instruction.argval] is torch.Tensor
    return instruction.argval == "Tensor" and instruction.opname.startswith("LOAD_")
