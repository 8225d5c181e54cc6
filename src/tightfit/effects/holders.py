"""Objects that hold others by name or position (attributes, dicts, lists, sets), with their contents saved and restored by snapshots."""

import abc
import functools
import itertools
import operator
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from typing import Any, final

import torch

from tightfit.effects.identities import identities

PLAIN = (int, float, bool, str, bytes, complex, type(None))
# Of longer lists (a data set, say) only the length, this many items and the last are compared.
_LARGEST_CONTAINER = 1 << 20
# From which length on the addresses of all items are compared at once.
_MANY = 1 << 10
# Where all is to be seen: a list of counts per example is as long as a data set.
_LARGEST_WHOLE = 1 << 22


def is_plain(value: Any) -> bool:
    """Whether a value has nothing that can change; an object of a subclass of `int`, say, may have attributes."""
    return isinstance(value, PLAIN) and not type(value).__dictoffset__


def same_value(one: Any, other: Any) -> bool:
    """Whether two reads give the same: by equality for plain values, by identity otherwise."""
    return one is other or (type(one) is type(other) and isinstance(one, PLAIN) and one == other)


class Holder(abc.ABC):
    """One holder at `path`, which names it for the user; `key` is equal for the same object."""

    def __init__(self, path: str, key: Any) -> None:
        self.path = path
        self.key = key

    @abc.abstractmethod
    def content(self, *, is_kept: bool) -> Any:
        """The current contents. `is_kept`: for a snapshot that may outlive the step, which must not keep autograd graphs alive."""

    @abc.abstractmethod
    def same(self, one: Any, other: Any) -> bool:
        """Whether two contents are the same."""

    def is_still(self, content: Any) -> bool:
        """Whether the contents are the same now."""
        return self.same(self.content(is_kept=False), content)

    @abc.abstractmethod
    def changed(self, one: Any, other: Any) -> Iterable[str]:
        """The suffixes of the path, one for each difference."""

    @abc.abstractmethod
    def put(self, content: Any) -> None:
        """Restores `content`."""

    @abc.abstractmethod
    def with_replaced(self, content: Any, others: Mapping[int, Any]) -> Any:
        """`content` with values replaced by `others`, given by `id`; the same object if none is replaced."""


# What a class is made of, besides its state.
_CODE = (
    types.FunctionType,
    types.BuiltinFunctionType,
    staticmethod,
    classmethod,
    property,
    functools.cached_property,
    type,
)


class _InGraph:
    """A weak placeholder in a snapshot for a tensor with a graph, which would otherwise keep the graph of every earlier call alive."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = weakref.ref(tensor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _InGraph) and self.tensor() is not None and self.tensor() is other.tensor()

    __hash__ = object.__hash__


def _kept(value: Any) -> Any:
    return _InGraph(value) if isinstance(value, torch.Tensor) and value.grad_fn is not None else value


def other_objects(one: Collection[Any], other: Collection[Any]) -> Iterable[tuple[Any, Any]]:
    """The pairs of items that are not the same object, which is asked in C: of many thousands few are."""
    return itertools.compress(zip(one, other, strict=True), map(operator.is_not, one, other))


def _same_item(one: Any, other: Any) -> bool:
    if isinstance(one, _InGraph):
        one = one.tensor()
    if isinstance(other, _InGraph):
        other = other.tensor()
    return same_value(one, other)


@final
class Names(Holder):
    """A dict, or the attributes of an object; `mapping` gives it, None once the object is gone. With `only`, these names alone."""

    def __init__(
        self,
        path: str,
        key: Any,
        mapping: Callable[[], MutableMapping[Any, Any] | None],
        *,
        only: tuple[str, ...] | None = None,
        is_attributes: bool = False,
        keeps_graphs: bool = False,
    ) -> None:
        super().__init__(path, key)
        self._mapping = mapping
        self._only = only
        self._is_attributes = is_attributes
        # Parameters that are computed (`torch.func.functional_call`) have a graph, and a second run needs them.
        self._keeps_graphs = keeps_graphs

    def content(self, *, is_kept: bool) -> dict[Any, Any]:
        mapping = self._mapping()
        if mapping is None:
            return {}
        held = dict(mapping) if self._only is None else {n: mapping[n] for n in self._only if n in mapping}
        if is_kept and not self._keeps_graphs:
            for name, value in held.items():
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    held[name] = _InGraph(value)
        return held

    def same(self, one: dict[Any, Any], other: dict[Any, Any]) -> bool:
        # The common case in C functions alone: a snapshot is taken in every call of a block, and one Python
        # call per attribute took six times as long (docs/log.md, 2026-11-22).
        if len(one) == len(other) and all(map(operator.is_, one.values(), other.values())) and list(one) == list(other):
            return True
        return not self._is_reordered(one, other) and not any(True for _ in self._changed(one, other))

    def _is_reordered(self, one: dict[Any, Any], other: dict[Any, Any]) -> bool:
        """Whether a dict has the same keys in another order: what was used last is at the end of an OrderedDict."""
        return (
            not self._is_attributes and self._only is None and one.keys() == other.keys() and list(one) != list(other)
        )

    def _changed(self, one: dict[Any, Any], other: dict[Any, Any]) -> Iterable[Any]:
        for name in {**one, **other}:
            if (name in one) is not (name in other) or not _same_item(one.get(name), other.get(name)):
                yield name

    def changed(self, one: dict[Any, Any], other: dict[Any, Any]) -> Iterable[str]:
        for name in self._changed(one, other):
            yield f".{name}" if self._is_attributes or self._only is not None else f"[{name!r}]"
        if self._is_reordered(one, other):
            yield "{...}"

    def with_replaced(self, content: Any, others: Mapping[int, Any]) -> Any:
        if not others or not any(id(value) in others for value in content.values()):
            return content
        return {name: others.get(id(value), value) for name, value in content.items()}

    def put(self, content: dict[Any, Any]) -> None:
        mapping = self._mapping()
        if mapping is None:
            return
        names = list(mapping) if self._only is None else [n for n in self._only if n in mapping]
        content = {n: v.tensor() if isinstance(v, _InGraph) else v for n, v in content.items() if not is_gone(v)}
        for name in names:
            if name not in content:
                del mapping[name]
        for name, value in content.items():
            if name not in mapping or mapping[name] is not value:
                mapping[name] = value
        if not self._is_attributes and self._only is None and list(mapping) != list(content):
            for name in content:
                mapping[name] = mapping.pop(name)


def in_graphs(content: Any) -> list[torch.Tensor]:
    """The live tensors with a graph among the contents, which are held weakly."""
    values = content.values() if isinstance(content, dict) else content
    # By C functions alone where there is none: a program may keep lists of many thousands.
    if _InGraph not in set(map(type, values)):
        return []
    found = [value.tensor() for value in values if isinstance(value, _InGraph)]
    return [tensor for tensor in found if tensor is not None]


def has_gone(items: Iterable[Any]) -> bool:
    """Whether a tensor with a graph among them was freed since."""
    return _InGraph in set(map(type, items)) and any(map(is_gone, items))


def is_gone(value: Any) -> bool:
    """Whether a snapshot had a tensor with a graph here that was freed since."""
    return isinstance(value, _InGraph) and value.tensor() is None


@final
class Items(Holder):
    """A list or a deque; with `is_whole` all of it, where it has not millions of items."""

    def __init__(self, path: str, sequence: list[Any] | deque[Any], *, is_whole: bool = False) -> None:
        super().__init__(path, id(sequence))
        self._sequence = sequence
        self._largest = _LARGEST_WHOLE if is_whole else _LARGEST_CONTAINER
        # Long contents that were compared last, with the addresses of their items.
        self._compared: tuple[Any, Any] | None = None

    def content(self, *, is_kept: bool) -> Any:
        if len(self._sequence) > self._largest:
            stride = len(self._sequence) // self._largest + 1
            return len(self._sequence), list(itertools.islice(self._sequence, 0, None, stride)), self._sequence[-1]
        held = list(self._sequence)
        has_tensors = is_kept and any(issubclass(kind, torch.Tensor) for kind in set(map(type, held)))
        return [_kept(value) for value in held] if has_tensors else held

    def is_still(self, content: Any) -> bool:
        # Asked in C, and without a copy: most lists stay what they are.
        if isinstance(content, list) and len(content) == len(self._sequence) > _MANY:
            if self._compared is None or self._compared[0] is not content:
                self._compared = content, identities(tuple(content))
            if identities(tuple(self._sequence)) == self._compared[1]:
                return True
        return super().is_still(content)

    def same(self, one: Any, other: Any) -> bool:
        if type(one) is not type(other):
            return False
        if isinstance(one, tuple):
            return one[0] == other[0] and all(map(_same_item, (*one[1], one[2]), (*other[1], other[2])))
        return len(one) == len(other) and all(itertools.starmap(_same_item, other_objects(one, other)))

    def changed(self, one: Any, other: Any) -> Iterable[str]:
        yield "[...]"

    def with_replaced(self, content: Any, others: Mapping[int, Any]) -> Any:
        if isinstance(content, tuple):
            return content
        return [others.get(id(value), value) for value in content] if any(id(v) in others for v in content) else content

    def put(self, content: Any) -> None:
        if isinstance(content, tuple):
            # Of a long list, what was appended is taken off again, and what was looked at is put back.
            for _ in range(len(self._sequence) - content[0]):
                self._sequence.pop()
            stride = content[0] // self._largest + 1
            for position, item in zip((*range(0, content[0], stride), -1), (*content[1], content[2]), strict=False):
                if self._sequence[position] is not item:
                    self._sequence[position] = item
            return
        values = [v.tensor() if isinstance(v, _InGraph) else v for v in content]
        # In place: others may hold the same list.
        self._sequence.clear()
        self._sequence.extend(values)


_NUMBERS = frozenset((int, float, bool))


class _Ordered(set[Any]):
    """The members of a set, in the order in which it gives them, and the size of its table: both decide what it gives next.

    `is_order_known`: it is the same in each run of a program, as that of numbers is; that of texts and objects is not, and nothing can go by it.
    """

    def __init__(self, members: set[Any]) -> None:
        super().__init__(members)
        self.order = tuple(members)
        self.num_bytes = sys.getsizeof(members)
        self.is_order_known = _NUMBERS.issuperset(map(type, self.order))


def has_lost_members(one: Any, other: Any) -> bool:
    """Whether a set has given members away: which one `pop` gives next depends on those that it gave before, and nothing puts that back."""
    return isinstance(one, _Ordered) and not one <= other


@final
class Members(Holder):
    """A set."""

    def __init__(self, path: str, members: set[Any]) -> None:
        super().__init__(path, id(members))
        self._members = members

    def content(self, *, is_kept: bool) -> Any:
        return _Ordered(self._members)

    def is_still(self, content: Any) -> bool:
        if self._members != content:
            return False
        is_in_order = sys.getsizeof(self._members) == content.num_bytes and tuple(self._members) == content.order
        return is_in_order or not content.is_order_known

    def same(self, one: Any, other: Any) -> bool:
        is_in_order = one == other and one.order == other.order and one.num_bytes == other.num_bytes
        return is_in_order or (one == other and not one.is_order_known)

    def changed(self, one: Any, other: Any) -> Iterable[str]:
        yield "{...}"

    def with_replaced(self, content: Any, others: Mapping[int, Any]) -> Any:
        return _Ordered({others.get(id(value), value) for value in content}) if others else content

    def put(self, content: Any) -> None:
        # Anew, one by one: what was taken out of a table leaves a mark there, and the next member goes to another place.
        self._members.clear()
        for member in content.order:
            self._members.add(member)


def class_state(kind: type) -> dict[str, Any]:
    """The attributes of a class that are neither code nor Python's own."""
    return {n: v for n, v in vars(kind).items() if not n.startswith("__") and not isinstance(v, _CODE)}


@final
class ClassAttributes(Holder):
    """The class attributes of a user's class, such as a counter over all instances; methods are left out."""

    def __init__(self, path: str, kind: type) -> None:
        super().__init__(path, id(kind))
        self._kind = kind

    def content(self, *, is_kept: bool) -> dict[str, Any]:
        return {name: _kept(value) if is_kept else value for name, value in class_state(self._kind).items()}

    def same(self, one: dict[str, Any], other: dict[str, Any]) -> bool:
        return one.keys() == other.keys() and all(_same_item(value, other[name]) for name, value in one.items())

    def changed(self, one: dict[str, Any], other: dict[str, Any]) -> Iterable[str]:
        for name in {**one, **other}:
            if not _same_item(one.get(name), other.get(name)):
                yield f".{name}"

    def with_replaced(self, content: Any, others: Mapping[int, Any]) -> Any:
        return {name: others.get(id(value), value) for name, value in content.items()}

    def put(self, content: dict[str, Any]) -> None:
        for name in self.content(is_kept=False).keys() - content.keys():
            delattr(self._kind, name)
        for name, value in content.items():
            if not is_gone(value) and vars(self._kind).get(name) is not value:
                setattr(self._kind, name, value.tensor() if isinstance(value, _InGraph) else value)
