"""Keeps torch's compiler from being imported until it is really used.

Optimizers and fake tensors import `torch._dynamo` only to read one setting and to switch it off, and importing it takes as long as importing
torch. A stand-in module answers until an attribute or a submodule other than its settings is accessed; then the real package replaces it.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tightfit.errors.faults import for_torch

_NAME = "torch._dynamo"
# Those that others import for a name of their own, and that import nothing of the package themselves.
_LIGHT_SUBMODULES = ("config", "_trace_wrapped_higher_order_op")


class _StandIn(types.ModuleType):
    """`torch._dynamo` as long as nothing is compiled."""

    def __init__(self) -> None:
        super().__init__(_NAME)
        self.__path__ = []

    @staticmethod
    def disable(fn: Callable[..., Any] | None = None, recursive: bool = True, **_kwargs: Any) -> Any:
        """Nothing is compiled, so nothing has to be excluded."""
        return fn if fn is not None else lambda function: function

    @staticmethod
    def assume_constant_result(fn: Callable[..., Any]) -> Callable[..., Any]:
        """A mark for the compiler."""
        return fn

    @staticmethod
    def allow_in_graph(fn: Any) -> Any:
        """A mark for the compiler."""
        return fn

    @staticmethod
    def mark_static_address(tensor: torch.Tensor, guard: bool = True) -> None:
        """A mark for the compiler."""

    @staticmethod
    def graph_break(msg: str = "") -> None:
        """Does nothing: there is no graph."""

    @staticmethod
    def is_compiling() -> bool:
        """Never."""
        return False

    def __getattr__(self, name: str) -> Any:
        # `inspect`, pickling and doctest probe modules for dunder names; that is no use of the compiler.
        if name.startswith("__"):
            raise for_torch(AttributeError(name))
        return getattr(_load_real(), name)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the light submodules in their files; the import of any other one loads the real package first."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(_NAME + ".") or not isinstance(sys.modules.get(_NAME), _StandIn):
            return None
        submodule = fullname.removeprefix(_NAME + ".")
        if submodule in _LIGHT_SUBMODULES:
            return importlib.util.spec_from_file_location(
                fullname, Path(torch.__file__).parent / "_dynamo" / f"{submodule}.py"
            )
        _load_real()
        return importlib.util.find_spec(fullname)


_finder = _Finder()


def keep_compiler_out() -> None:
    """Installs the stand-in module, unless the compiler is imported already."""
    if _NAME in sys.modules:
        return
    sys.meta_path.insert(0, _finder)
    # Both, since `import torch._dynamo` looks in sys.modules and `torch._dynamo` is an attribute of the
    # package.
    sys.modules[_NAME] = stand_in = _StandIn()
    setattr(torch, "_dynamo", stand_in)  # noqa: B010 - its type is not the real one


def _load_real() -> types.ModuleType:
    if isinstance(sys.modules.get(_NAME), _StandIn):
        sys.meta_path.remove(_finder)
        del sys.modules[_NAME]
        delattr(torch, "_dynamo")
        importlib.import_module(_NAME)
    return sys.modules[_NAME]
