"""What a node of an autograd graph has saved, without unpacking it: the attributes that hold it, its data, and the hook that would unpack it.

From torch 2.10 on a saved tensor says both. Up to 2.9 they are read where C++ has them (torch/csrc/autograd/saved_variable.h, PySavedVariableHooks): the
tensor comes first, and a pointer to its hooks at one of two places, which is found by tensors that were saved with known hooks and without any.
"""

import ctypes
import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tightfit.errors import UnsupportedTorch
from tightfit.torch_hooks.manifest import SAVED_DATA, SAVED_HOOK, SAVED_PREFIX, WRAP_TENSOR

_CONTEXT = torch.autograd.function.BackwardCFunction
_WORD = ctypes.sizeof(ctypes.c_void_p)
# An object of pybind11 has the pointer to what it wraps behind its head (include/pybind11/detail/common.h, `instance`).
_HEAD = object.__basicsize__
_OFFSETS_OF_HOOKS = (7 * _WORD, 6 * _WORD)
# Of PySavedVariableHooks, after the pointer to its vtable: how to pack, how to unpack, what was packed.
_PACK, _UNPACK, _PACKED = _WORD, 2 * _WORD, 3 * _WORD


def saved_variables_of(node: Any) -> tuple[str, ...]:
    """The names of its saved variables: one for each input of its derivative formula that is saved."""
    kind = type(node)
    # Each `torch.autograd.Function` has a class of contexts, which a cache would keep, and with it all that the program's module holds.
    return _names(_CONTEXT if issubclass(kind, _CONTEXT) else kind)


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith(SAVED_PREFIX))


@dataclasses.dataclass(frozen=True, slots=True)
class SavedReader:
    """Two questions to a saved tensor: its data, which is what its hooks have packed where it has some, and the hook that unpacks it, or None."""

    data_of: Callable[[Any], Any]
    hook_of: Callable[[Any], Any]


@cache
def saved_reader() -> SavedReader:
    """What the installed torch is asked with. Looked up once: it is asked for each node of a graph.

    Raises:
        UnsupportedTorch: it is older than 2.10, and has saved tensors in memory in another way than those that are known.
    """
    if SAVED_DATA.is_expected():
        return SavedReader(SAVED_DATA.value().fget, SAVED_HOOK.value().fget)
    layout = _Layout.find()
    return SavedReader(layout.data_of, layout.hook_of)


def _word(address: int) -> int:
    return ctypes.c_size_t.from_address(address).value


def _object(address: int) -> Any:
    return ctypes.cast(address, ctypes.py_object).value


@dataclasses.dataclass(frozen=True, slots=True)
class _Layout:
    """Where a saved tensor has its hooks. `vtable` is that of hooks in Python: of others no more is known than that they are there."""

    offset: int
    vtable: int
    wrap: Callable[[int], Any]

    @classmethod
    def find(cls) -> "_Layout":
        """Looks at saved tensors of which everything is known."""
        one, other = torch.ones(1, requires_grad=True, device="cpu"), torch.ones(1, device="cpu")
        hooks = (lambda tensor: (tensor,), lambda packed: packed[0])
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(*hooks):
            hooked: Any = (one * other).grad_fn
        with torch.enable_grad():
            plain: Any = (one * other).grad_fn
        # With hooks of the program around, `plain` has them, and nothing is found.
        without, with_hooks = (cls._place(getattr(node, f"{SAVED_PREFIX}other")) for node in (plain, hooked))
        if _word(without) == other._cdata:
            for offset in _OFFSETS_OF_HOOKS:
                place = _word(with_hooks + offset)
                if place and not _word(without + offset) and _word(place + _UNPACK) == id(hooks[1]):
                    return cls(offset, _word(place), _wrapper())
        raise UnsupportedTorch(
            f"torch {torch.__version__} has what a graph saves in memory in another way than expected, which tightfit needs {SAVED_DATA.purpose}; "
            f"install torch {SAVED_DATA.first} or later"
        )

    @staticmethod
    def _place(saved: Any) -> int:
        return _word(id(saved) + _HEAD)

    def data_of(self, saved: Any) -> Any:
        """As `SavedTensor.data` of torch 2.10."""
        place = self._place(saved)
        hooks = _word(place + self.offset)
        if not hooks:
            return self.wrap(place)
        return _object(_word(hooks + _PACKED)) if self._is_pythons(hooks) else None

    def hook_of(self, saved: Any) -> Any:
        """As `SavedTensor.unpack_hook` of torch 2.10."""
        hooks = _word(self._place(saved) + self.offset)
        if not hooks:
            return None
        return _object(_word(hooks + _UNPACK)) if self._is_pythons(hooks) else _unknown_hook

    def _is_pythons(self, hooks: int) -> bool:
        return _word(hooks) == self.vtable and bool(_word(hooks + _PACKED))


def _unknown_hook(_packed: object) -> None:
    """In the place of a hook that is not Python's."""


def _wrapper() -> Callable[[int], Any]:
    """The function that makes a Python object for the tensor at an address, or returns the one that it has; None for an undefined one."""
    library = ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / f"lib{WRAP_TENSOR.library}.so"))
    try:
        wrap = library[WRAP_TENSOR.name]
    except AttributeError as error:
        raise UnsupportedTorch(
            f"torch {torch.__version__} has no symbol {WRAP_TENSOR.name}, which tightfit needs {WRAP_TENSOR.purpose}; install torch {SAVED_DATA.first} or later"
        ) from error
    wrap.restype, wrap.argtypes = ctypes.py_object, (ctypes.c_void_p,)
    return wrap
