"""The table of an optimizer's states on one rank, which has those of its share of the parameters."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from tightfit.techniques.wrappers.first_order import Refuse


def _asked(name: str) -> Callable[..., Any]:
    """A method of `defaultdict` that tells what is in it."""
    plain = getattr(defaultdict, name)

    def method(states: "StatesOfShare", *args: Any, **kwargs: Any) -> Any:
        if not states.is_open:
            raise states.refuse(
                "the program reads the states of an optimizer, which are sharded: optimizer.state_dict() has all of them"
            )
        return plain(states, *args, **kwargs)

    return method


class StatesOfShare(defaultdict[Any, Any]):
    """The states, for the optimizer's own code: the program would read them as if they were all."""

    def __init__(self, states: Mapping[Any, Any], refuse: Refuse) -> None:
        super().__init__(dict, states)
        self.refuse, self.is_open = refuse, True


# What puts states in (`state[p] = ...`, `update`, `clear`) does the same on all ranks.
_ASKS = (
    *("__contains__", "__copy__", "__delitem__", "__eq__", "__getitem__", "__ior__", "__iter__", "__len__", "__ne__"),
    *("__or__", "__reduce__", "__repr__", "__reversed__", "__ror__"),
    *("copy", "get", "items", "keys", "pop", "popitem", "setdefault", "values"),
)
for _name in _ASKS:
    setattr(StatesOfShare, _name, _asked(_name))
