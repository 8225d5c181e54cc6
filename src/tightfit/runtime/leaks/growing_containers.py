"""Python containers that have grown between two looks, with what one of their elements takes outside of torch: arrays, bytes, strings."""

import collections
import dataclasses
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from tightfit.runtime.leaks.object_edges import edges_of, is_of

_CONTAINERS = (list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict)
# What outlives a few steps and has fewer elements than that has not grown by one per step.
_MAX_OBJECTS_OF_AN_ELEMENT = 1_000
_MAX_SAMPLES = 3


@dataclasses.dataclass(frozen=True, slots=True)
class GrowingContainer:
    """A container with elements per step, and the bytes that it grows by with each step."""

    container: Any
    elements_per_step: float
    bytes_per_step: float
    newest: str


def lengths() -> dict[int, int]:
    """The lengths of all containers, by identity; kept as numbers, so that nothing is kept alive."""
    return {id(found): len(found) for found in _containers()}


def grown_since(
    before: dict[int, int], num_steps: int, is_unseen: Callable[[torch.Tensor], bool]
) -> list[GrowingContainer]:
    """The containers that have grown by an element per two steps or more, those with most bytes first; `is_unseen`: bytes of a tensor are counted too."""
    found = []
    for value in _containers():
        if value is before:
            continue
        more = (len(value) - before.get(id(value), len(value))) / max(1, num_steps)
        if more >= 0.5:
            newest = _newest(value)
            if newest:
                each = sum(_bytes_of(element, is_unseen) for element in newest) / len(newest)
                found.append(GrowingContainer(value, more, more * each, type(newest[0]).__name__))
    return sorted(found, key=lambda one: -one.bytes_per_step)


def _containers() -> Iterator[Any]:
    """All containers; the garbage collector does not know dicts of numbers and bytes, which are found by what refers to them."""
    for found in gc.get_objects():
        if type(found) in _CONTAINERS:
            yield found
        for each in gc.get_referents(found):
            if type(each) is dict and not gc.is_tracked(each):
                yield each


def _newest(value: Any) -> list[Any]:
    values = list(value.items() if is_of(value, dict) else value)
    return values[-_MAX_SAMPLES:]


def _bytes_of(value: Any, is_unseen: Callable[[torch.Tensor], bool]) -> float:
    """Bytes outside of torch, and of tensors that were not seen, that an element refers to, within a bound."""
    waiting, seen, total = [value], {id(value)}, 0.0
    for each in waiting:
        if is_of(each, np.ndarray):
            total += each.nbytes if each.base is None or not is_of(each.base, np.ndarray) else each.base.nbytes
        elif is_of(each, (str, bytes, bytearray)):
            total += sys.getsizeof(each)
        elif is_of(each, (tuple, list)):
            waiting += each[:_MAX_OBJECTS_OF_AN_ELEMENT]
        elif is_of(each, torch.Tensor):
            total += each.untyped_storage().nbytes() if is_unseen(each) else 0
        elif not is_of(each, torch.nn.Module):
            for _, inner in edges_of(each):
                if id(inner) not in seen and len(waiting) < _MAX_OBJECTS_OF_AN_ELEMENT:
                    seen.add(id(inner))
                    waiting.append(inner)
            if is_of(each, dict):
                waiting += [inner for inner in dict.values(each) if is_of(inner, (str, bytes, bytearray))]
    return total
