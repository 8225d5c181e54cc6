"""The states of one parameter, of which the program sees ordinary tensors only: what is kept in another form is decoded when it is asked for.

For exact formats, where nothing may tell the planned run from the plain one: not the type of a state, and not a name that the program has for it. What
was decoded stays so until the parameter's next update.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from tightfit.techniques.lazy_tensors.lazy_tensor import LazyTensor
from tightfit.torch_hooks.manifest import STORAGE_USES

# The tensor, and the name that asks.
_OWN_USES = 2


class DecodingStates(dict[str, Any]):
    """A dict of states, some of them lazy. What goes past its methods (`{**states}`) finds lazy tensors, which compute their elements when they are read."""

    def decode(self) -> None:
        """Has ordinary tensors for all states."""
        for name, value in dict.items(self):
            if isinstance(value, LazyTensor):
                # A value for a key that is there: the dict keeps its size and its order while it is gone through.
                dict.__setitem__(self, name, value.whole())

    def __getitem__(self, name: str) -> Any:
        value = dict.__getitem__(self, name)
        if isinstance(value, LazyTensor):
            value = value.whole()
            dict.__setitem__(self, name, value)
        return value

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def pop(self, name: str, *default: Any) -> Any:
        if name in self:
            self[name]
        return dict.pop(self, name, *default)

    def popitem(self) -> tuple[str, Any]:
        self.decode()
        return dict.popitem(self)

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name in self:
            return self[name]
        return dict.setdefault(self, name, default)

    def items(self) -> Any:
        self.decode()
        return dict.items(self)

    def values(self) -> Any:
        self.decode()
        return dict.values(self)

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # A copy and a pickle of an optimizer go without the plan.
        return dict, (self.copy(),)


def num_holders(mapping: Mapping[Any, Any], key: Any) -> int:
    """How many references there are to the value of `key` besides that of `mapping`, which is a dict."""
    return _references(mapping, key) - _OWN_REFERENCES


def is_shared(states: dict[str, Any], name: str) -> bool:
    """Whether the program has a name of its own for this state, or for its memory: it would see the next update there."""
    if num_holders(states, name):
        return True
    tensor = dict.__getitem__(states, name)
    storage = tensor.untyped_storage()
    return tensor._is_view() or STORAGE_USES.call(storage._cdata) > _OWN_USES


def _references(mapping: Mapping[Any, Any], key: Any) -> int:
    return sys.getrefcount(dict.__getitem__(mapping, key))  # type: ignore[arg-type]


# That of the dict, and those of the call itself, which differ between releases of Python.
_OWN_REFERENCES = _references({"": object()}, "")
