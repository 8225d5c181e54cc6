"""What lies beyond the objects that a walk looks at one by one (many items of a container, very many objects): seen to change, and never put back.

Counts per example are such: `stats[index]["seen"] += 1`. All is gone through by functions in C, level by level.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, final

import numpy as np
import torch

from tightfit.effects.holders import PLAIN, other_objects, same_value
from tightfit.effects.identities import identities
from tightfit.effects.reachable.containers import MAX_ITEMS
from tightfit.effects.reachable.drawn import Drawn
from tightfit.effects.reachable.scopes import slots_of
from tightfit.effects.users_code import is_users_class

_LEVELS = 8
# Of what would be longer (rows of tokens in a data set) the lengths are compared alone.
_LARGEST_LEVEL = 1 << 21
# Arrays of more than that together, a data set say, are compared by identity alone.
_LARGEST_ARRAYS_BYTES = 1 << 24
_PLAIN = frozenset(PLAIN)
_CONTAINERS = (dict, list, deque, tuple, set)
_BASIC: tuple[Any, ...] = (*_CONTAINERS, frozenset)
# What these hold is looked at elsewhere, or changes with each step.
_NOT_OPENED = (torch.nn.Module, torch.optim.Optimizer, torch.Tensor)


def many_items(path: str, container: Any) -> Drawn | None:
    """What there is beyond the first items; None where nothing of that can change."""
    if _length(container) <= MAX_ITEMS:
        return None
    kinds = set(map(type, beyond := _beyond(container)))
    # Rules of a tokeniser are pairs of texts.
    if kinds <= _PLAIN | {tuple}:
        kinds = set(map(type, itertools.chain.from_iterable(each for each in beyond if type(each) is tuple)))
    if _is_unchanging(kinds):
        return None
    return Drawn(path=f"{path}[{MAX_ITEMS}:]", key=id(container), state=_Last(lambda: _beyond(container)), put=None)


def _length(container: Any) -> int:
    """How many items it has, by its basic class: that of a program may raise (e3nn's `Irrep`, a tuple that is one object), or count."""
    return next(kind for kind in _BASIC if isinstance(container, kind)).__len__(container)


def left_out(path: str, objects: list[Any]) -> Drawn:
    """Objects for which a walk had no room."""
    return Drawn(path=path, key=id(objects), state=_Last(lambda: objects), put=None)


def _beyond(container: Any) -> list[Any]:
    values = container.values() if isinstance(container, dict) else container
    return list(itertools.islice(values, MAX_ITEMS, None))


def _is_unchanging(kinds: Iterable[type]) -> bool:
    return _PLAIN.issuperset(kinds)


@final
class _Last:
    """Looks at the same objects each time; as long as nothing changes, which is asked in C, snapshots share what it has seen."""

    __slots__ = ("_identities", "_objects", "_seen")

    def __init__(self, objects: Callable[[], list[Any]]) -> None:
        self._objects = objects
        self._seen: _Level | None = None
        self._identities: Any = None

    def __call__(self) -> "_Level":
        objects = self._objects()
        if self._seen is not None and self._seen.is_readable and self._seen.read_again(objects) == self._identities:
            return self._seen
        now = _Level(objects)
        if self._seen is None or self._seen != now:
            self._seen = now
        self._identities = self._seen.read_again(objects) if self._seen.is_readable else None
        return self._seen


@final
class _Level:
    """Objects and all below them: equal to another one of the same objects, with the same below them."""

    __slots__ = ("_views", "is_readable", "items", "lengths", "versions")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, values: list[Any]) -> None:
        self.items: list[Any] = []
        self.lengths: list[int] = []
        self.versions: list[int] = []
        self.is_readable = True
        """Whether `read_again` sees all that is compared."""
        # Of dicts and attributes these follow what they are views of.
        self._views: list[Any] = []
        seen: set[int] = set()
        for _ in range(_LEVELS):
            kinds = set(map(type, values))
            self.items.append(values)
            if _is_unchanging(kinds):
                return
            # Once each: objects may refer to each other.
            others = {id(value): value for value in values if type(value) not in _PLAIN and id(value) not in seen}
            seen.update(others)
            if any(issubclass(kind, torch.Tensor) for kind in kinds):
                self._note_tensors(others.values())
            if np.ndarray in kinds:
                self._note_arrays(others.values())
            by_kind: dict[type, list[Any]] = {}
            for value in others.values():
                by_kind.setdefault(type(value), []).append(value)
            opened = list(itertools.chain.from_iterable(_opened(held, kind) for kind, held in by_kind.items()))
            lengths = list(map(len, opened))
            self.lengths += lengths
            self._views += opened
            self.is_readable &= not any(map(slots_of, by_kind))
            if sum(lengths) > _LARGEST_LEVEL:
                return
            values = list(itertools.chain.from_iterable(opened))

    def read_again(self, objects: list[Any]) -> Any:
        """What is the same as long as all of it is, and nothing was made of it anew."""
        # The tuple is alive while it is read.
        return (
            identities(tuple(itertools.chain(objects, itertools.chain.from_iterable(self._views)))),
            list(map(len, self._views)),
        )

    def _note_tensors(self, values: Iterable[Any]) -> None:
        self.is_readable = False
        self.versions += [v._version for v in values if isinstance(v, torch.Tensor) and not v.is_inference()]
        # What has a graph is not kept alive.
        self.items[-1] = [id(v) if isinstance(v, torch.Tensor) and v.grad_fn is not None else v for v in self.items[-1]]

    def _note_arrays(self, values: Iterable[Any]) -> None:
        self.is_readable = False
        arrays = [value for value in values if type(value) is np.ndarray and not value.dtype.hasobject]
        if sum(array.nbytes for array in arrays) <= _LARGEST_ARRAYS_BYTES:
            self.versions += [hash(array.tobytes()) for array in arrays]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Level) or (self.lengths, self.versions) != (other.lengths, other.versions):
            return False
        if len(self.items) != len(other.items):
            return False
        both = zip(self.items, other.items, strict=True)
        return all(
            len(one) == len(then) and all(itertools.starmap(same_value, other_objects(one, then))) for one, then in both
        )


def _opened(values: list[Any], kind: type) -> Iterable[Any]:
    """What those of this class hold, each as something with a length."""
    if issubclass(kind, _NOT_OPENED):
        return ()
    if issubclass(kind, dict):
        return list(map(dict.values, values))
    if issubclass(kind, _CONTAINERS):
        return values
    if not is_users_class(kind):
        return ()
    found: list[Any] = [vars(value).values() for value in values] if kind.__dictoffset__ else []
    if slots := slots_of(kind):
        found += [[getattr(value, name, None) for name in slots] for value in values]
    return found
