"""What containers and wrappers of the program's refer to, by its places."""

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tightfit.effects.holders import PLAIN, is_plain
from tightfit.effects.reachable.scopes import inner_container

# Of a container no more is looked at one by one: a data set may be one.
MAX_ITEMS = 4_096
_PLAIN = frozenset(PLAIN)


def items_in(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The items of a container, and the keys that may refer to others, by their places."""
    # Texts and numbers hold nothing: most containers have nothing else, which is asked in C.
    if isinstance(value, dict):
        if not (_PLAIN.issuperset(map(type, value.values())) and _PLAIN.issuperset(map(type, value))):
            for name, inner in itertools.islice(list(value.items()), MAX_ITEMS):
                yield f"{path}[{name!r}]", inner
                if not is_plain(name):
                    yield f"{path}[{name!r}]", name
        if isinstance(value, defaultdict):
            yield f"{path}.default_factory", value.default_factory
    else:
        items = list(itertools.islice(value, MAX_ITEMS))
        if not _PLAIN.issuperset(map(type, items)):
            yield from ((f"{path}[{number}]", inner) for number, inner in enumerate(items))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in dicts, lists and tuples, as far as their items are looked at one by one."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, dict | list | tuple):
            items = list(itertools.islice(each.values() if isinstance(each, dict) else each, MAX_ITEMS))
            # Asked in C: most have texts and numbers alone.
            if not _PLAIN.issuperset(map(type, items)):
                waiting += reversed(items)


def wrapped_by(value: Any) -> Sequence[Any] | None:
    """What a wrapper of functions, or of another container, refers to; None of anything else."""
    if isinstance(value, functools._lru_cache_wrapper):
        return (value.__wrapped__,)
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    inner = inner_container(value)
    return None if inner is None else (inner,)
