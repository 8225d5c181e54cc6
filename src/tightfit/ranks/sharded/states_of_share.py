"""The table of an optimizer's states on one rank, which has those of its share of the parameters; whoever else reads it finds all of them."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any


def _asked(name: str) -> Callable[..., Any]:
    """A method of `defaultdict` that tells what is in it."""
    plain = getattr(defaultdict, name)

    def method(states: "StatesOfShare", *args: Any, **kwargs: Any) -> Any:
        states.complete()
        return plain(states, *args, **kwargs)

    return method


class StatesOfShare(defaultdict[Any, Any]):
    """The states: of its share while `is_open`, for the optimizer's own code, and else completed by `collect` before they are read."""

    def __init__(self, states: Mapping[Any, Any], collect: Callable[[], None]) -> None:
        super().__init__(dict, states)
        self._collect, self.is_open = collect, True

    def complete(self) -> None:
        """Before somebody reads what is in it."""
        if not self.is_open:
            self._collect()

    def __reduce__(self) -> Any:
        # A copy is of all of them, and of no optimizer.
        self.complete()
        return defaultdict, (dict,), None, None, iter(list(super().items()))

    def __copy__(self) -> Any:
        self.complete()
        return defaultdict(dict, super().items())

    def copy(self) -> Any:
        return self.__copy__()


# What puts states in (`state[p] = ...`, `update`, `clear`) does the same on all ranks.
_ASKS = (
    *("__contains__", "__delitem__", "__eq__", "__getitem__", "__ior__", "__iter__", "__len__", "__ne__", "__or__"),
    *("__repr__", "__reversed__", "__ror__", "get", "items", "keys", "pop", "popitem", "setdefault", "values"),
)
for _name in _ASKS:
    setattr(StatesOfShare, _name, _asked(_name))
