"""What a container of very many others holds, beyond the items that a walk looks at one by one: seen to change, and never put back.

Counts per example are such: `stats[index]["seen"] += 1`. All is gone through by functions in C, level by level.
"""

import itertools
import operator
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, final

import torch

from tightfit.effects.holders import PLAIN
from tightfit.effects.reachable.containers import MAX_ITEMS
from tightfit.effects.reachable.drawn import Drawn
from tightfit.effects.users_code import is_users_class

_LEVELS = 3
# Of what would be longer (rows of tokens in a data set) the lengths are compared alone.
_LARGEST_LEVEL = 1 << 21
_PLAIN = frozenset(PLAIN)
_CONTAINERS = (dict, list, deque, tuple, set)


def many_items(path: str, container: Any) -> Drawn | None:
    """What there is beyond the first items; None where nothing of that can change."""
    if len(container) <= MAX_ITEMS or _is_unchanging(set(map(type, _beyond(container)))):
        return None
    return Drawn(path=path, key=id(container), state=lambda: _Level(_beyond(container)), put=None)


def _beyond(container: Any) -> list[Any]:
    values = container.values() if isinstance(container, dict) else container
    return list(itertools.islice(values, MAX_ITEMS, None))


def _is_unchanging(kinds: Iterable[type]) -> bool:
    return _PLAIN.issuperset(kinds)


@final
class _Level:
    """Objects and all below them: equal to another one of the same objects, with the same below them."""

    __slots__ = ("items", "lengths", "versions")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, values: list[Any]) -> None:
        self.items: list[Any] = []
        self.lengths: list[int] = []
        self.versions: list[int] = []
        for _ in range(_LEVELS):
            kinds = set(map(type, values))
            self.items.append(values)
            if _is_unchanging(kinds):
                return
            if any(issubclass(kind, torch.Tensor) for kind in kinds):
                self.versions += [v._version for v in values if isinstance(v, torch.Tensor) and not v.is_inference()]
            opened = list(itertools.chain.from_iterable(_opened(values, kind) for kind in kinds if kind not in _PLAIN))
            lengths = list(map(len, opened))
            self.lengths += lengths
            if sum(lengths) > _LARGEST_LEVEL:
                return
            values = list(itertools.chain.from_iterable(opened))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Level) or (self.lengths, self.versions) != (other.lengths, other.versions):
            return False
        both = zip(self.items, other.items, strict=True)
        return all(len(one) == len(then) and all(map(operator.is_, one, then)) for one, then in both)


def _opened(values: list[Any], kind: type) -> Iterable[Any]:
    """What those of this class hold, each as something with a length."""
    opens: Callable[[Any], Any] | None = None
    if issubclass(kind, dict):
        opens = dict.values
    elif issubclass(kind, _CONTAINERS):
        opens = _itself
    elif kind.__dictoffset__ and is_users_class(kind):
        opens = _attributes
    return [opens(value) for value in values if type(value) is kind] if opens is not None else ()


def _itself(value: Any) -> Any:
    return value


def _attributes(value: Any) -> Any:
    return vars(value).values()
