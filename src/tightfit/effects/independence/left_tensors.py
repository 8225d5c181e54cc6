"""Tensors that a run of some code has put into attributes, dicts and lists that it can reach, also in tuples there: features that a hook keeps, an auxiliary loss."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from tightfit.effects.holders import Holder
from tightfit.effects.state import Snapshot

Signature = tuple[tuple[int, ...], torch.dtype, bool]


def signature_of(tensor: torch.Tensor) -> Signature:
    """What code may go by of a tensor, besides its values."""
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeftTensor:
    """A tensor that was put into `holder`, and the signature of the tensor that was there before, if one was."""

    path: str
    holder: Holder
    tensor: torch.Tensor
    was: Signature | None

    def put(self, other: Any) -> bool:
        """Puts something else in its place; whether that could be done."""
        content = self.holder.content(is_kept=False)
        others = {id(self.tensor): other}
        for value in content.values() if isinstance(content, dict) else content:
            if (changed := _replaced(value, self.tensor, other)) is not value:
                others[id(value)] = changed
        self.holder.put(self.holder.with_replaced(content, others))
        return all(value is not self.tensor for _, value in _items(self.holder.content(is_kept=False)))


def left_tensors(before: Snapshot, after: Snapshot) -> Iterator[LeftTensor]:
    """The tensors that were put somewhere between two snapshots, in the order of the second."""
    earlier = {holder.key: content for holder, content in zip(before.reach.holders, before.contents, strict=True)}
    for holder, content in zip(after.reach.holders, after.contents, strict=True):
        first = earlier.get(holder.key)
        if first is content or (first is not None and holder.same(first, content)):
            continue
        were = dict(_items(first))
        for name, value in _items(content):
            was = were.get(name)
            if isinstance(value, torch.Tensor) and value is not was:
                told = signature_of(was) if isinstance(was, torch.Tensor) else None
                yield LeftTensor(path=f"{holder.path}.{name}", holder=holder, tensor=value, was=told)


def attributes_of_fakes(tensors: Iterable[LeftTensor]) -> set[int]:
    """The attributes, by `id`, of those that are fake tensors as torch makes them: nothing of the program's."""
    fakes = [each.tensor for each in tensors if isinstance(each.tensor, FakeTensor)]
    return {id(vars(each)) for each in fakes if vars(each).keys() <= _names_of_fakes()}


@functools.cache
def _names_of_fakes() -> frozenset[str]:
    with _disable_current_modes(), FakeTensorMode():
        return frozenset(vars(torch.empty(0, device="cpu")))


def _items(content: Any) -> list[tuple[Any, Any]]:
    """What a holder has, tuples item by item: other containers are holders of their own."""
    if isinstance(content, dict):
        named: Iterable[tuple[Any, Any]] = content.items()
    else:
        named = enumerate(content) if isinstance(content, list) else ()
    return [pair for name, value in named for pair in _within(name, value)]


def _within(name: Any, value: Any) -> Iterator[tuple[Any, Any]]:
    if not _is_tuple(value):
        yield name, value
        return
    for number, item in enumerate(value):
        yield from _within(f"{name}[{number}]", item)


def _is_tuple(value: Any) -> bool:
    """Whether it is a tuple that can be made anew of other items."""
    return type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields"))


def _replaced(value: Any, one: torch.Tensor, other: Any) -> Any:
    """The same value, or a tuple with `other` in the place of `one`."""
    if value is one:
        return other
    if not _is_tuple(value):
        return value
    items = [_replaced(item, one, other) for item in value]
    if all(item is before for item, before in zip(items, value, strict=True)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
