"""What a model does to the dicts, lists and dataclasses that it is called with: it takes labels out, fills in metrics, appends losses. It was given copies, with its rows."""

import dataclasses
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import torch

from tightfit.ranks.values.structures import attributes_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Copied:
    """A container of the program's, and the copy that the model got, with what was in both."""

    original: Any
    copy: Any
    before: list[tuple[Any, Any]]
    own: list[tuple[Any, Any]]


class CopiedArguments:
    """The containers among the arguments of one call."""

    def __init__(self, originals: Iterable[Any], copies: Iterable[Any]) -> None:
        self._copied: list[_Copied] = []
        for original, made in zip(originals, copies, strict=True):
            self._add(original, made)

    def _add(self, original: Any, made: Any) -> None:
        if not isinstance(original, MutableMapping | list | tuple) and attributes_of(original) is None:
            return
        own, before = _items(original), _items(made)
        if not isinstance(original, tuple):
            self._copied.append(_Copied(original=original, copy=made, before=before, own=own))
        for (_, inner), (_, copied) in zip(own, before, strict=True):
            self._add(inner, copied)

    def do_to_originals(self, stand_in: Callable[[], Any]) -> None:
        """Does to the program's containers what the model has done to its own; for what it has put there, which is of its part of the batch, there is a stand-in."""
        whole = {id(part): own for each in self._copied for (_, part), (_, own) in zip(each.before, each.own, strict=True) if _is_object(part)}  # fmt: skip
        for each in self._copied:
            before, now = dict(each.before), _items(each.copy)
            if len(before) == len(now) and all(key in before and before[key] is value for key, value in now):
                continue
            of_plain = {key: own for (key, part), (_, own) in zip(each.before, each.own, strict=True) if not _is_object(part)}  # fmt: skip
            found = []
            for key, value in now:
                if id(value) in whole:
                    found.append((key, whole[id(value)]))
                elif value is None or (key in of_plain and before[key] is value):
                    found.append((key, value))
                else:
                    found.append((key, stand_in()))
            _put(each.original, found)


def _is_object(value: Any) -> bool:
    """Whether it is one that is told by its identity; of a number there may be one for all."""
    return isinstance(value, torch.Tensor | MutableMapping | list)


def _items(container: Any) -> list[tuple[Any, Any]]:
    if isinstance(container, list | tuple):
        return list(enumerate(container))
    if isinstance(container, MutableMapping):
        return list(container.items())
    # A dataclass or a namespace, of which the model may have set an attribute more; those with slots have none.
    return list((getattr(container, "__dict__", None) or attributes_of(container) or {}).items())


def _put(container: Any, items: list[tuple[Any, Any]]) -> None:
    if isinstance(container, list):
        container[:] = [value for _, value in items]
        return
    kept = dict(items)
    if not isinstance(container, MutableMapping):
        for key, _ in _items(container):
            if key not in kept:
                object.__delattr__(container, key)
        for key, value in items:
            # Of a frozen one too.
            object.__setattr__(container, key, value)
        return
    for key in [key for key in container if key not in kept]:
        del container[key]
    for key, value in items:
        if key not in container or container[key] is not value:
            container[key] = value
