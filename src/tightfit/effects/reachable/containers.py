"""What containers and wrappers of the program's refer to, by its places."""

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from tightfit.effects.holders import is_plain
from tightfit.effects.reachable.scopes import inner_container

# Of a container no more is looked at: a data set may be one.
_MAX_ITEMS = 4_096


def items_in(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The items of a container, and the keys that may refer to others, by their places."""
    if isinstance(value, dict):
        for name, inner in itertools.islice(list(value.items()), _MAX_ITEMS):
            yield f"{path}[{name!r}]", inner
            if not is_plain(name):
                yield f"{path}[{name!r}]", name
        if isinstance(value, defaultdict):
            yield f"{path}.default_factory", value.default_factory
    else:
        for number, inner in enumerate(itertools.islice(value, _MAX_ITEMS)):
            yield f"{path}[{number}]", inner


def wrapped_by(value: Any) -> Sequence[Any] | None:
    """What a wrapper of functions, or of another container, refers to; None of anything else."""
    if isinstance(value, functools._lru_cache_wrapper):
        return (value.__wrapped__,)
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    inner = inner_container(value)
    return None if inner is None else (inner,)
