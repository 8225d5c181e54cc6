"""Hands a traced program the largest batch that its data loaders can give, from some step on: a run that fits in its first steps may fail late, in the
step of its longest sample.

The data set is looked through before, for a bounded time: the size of an example is the number of elements in it. A loader in a known order gives the
largest of its own batches; one that shuffles may put its largest examples together, so it gives these. They are collated by the program's own
`collate_fn`. Random states are afterwards what they were.
"""

import dataclasses
import functools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from tightfit.capture.observe.attribution import user_line
from tightfit.capture.replace import replace

_MAX_EXAMPLES = 20_000
_MAX_SECONDS = 10.0
Assume = Callable[[str, str], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Largest:
    """A batch as `collate_fn` returns it, with its number of elements, and of how many examples of how many it is the largest."""

    batch: Any
    num_elements: int
    num_seen: int
    num_examples: int


class _Batches:
    """An iterator over a loader's batches, or its largest one in place of each that is smaller. For the rest it is the loader's own."""

    def __init__(self, own: Any, is_on: Callable[[], bool], largest: Callable[[Any], _Largest | None]) -> None:
        self._own = own
        self._is_on = is_on
        self._largest = largest

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._own)
        largest = self._largest(batch) if self._is_on() else None
        return batch if largest is None or largest.num_elements <= _num_elements(batch) else largest.batch

    def __len__(self) -> int:
        return len(self._own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def install(is_on: Callable[[], bool], assume: Assume) -> None:
    """From when `is_on` is true, each batch of a loader is its largest one, where that is larger. `assume` is told once for each loader."""
    begin = DataLoader.__iter__
    # By the identity of what they are of, which they hold, so that no other one gets its number: the loader, and the data set.
    known: dict[int, tuple[Any, _Largest | None]] = {}
    sizes: dict[int, tuple[Any, dict[int, int]]] = {}

    def largest_of(loader: Any) -> _Largest | None:
        dataset = loader.dataset
        has_numbers = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if isinstance(dataset, IterableDataset) or loader.batch_sampler is None or not has_numbers:
            return None
        if id(dataset) not in sizes:
            sizes[id(dataset)] = dataset, _sizes_of_examples(dataset)
        return _largest_batch(loader, sizes[id(dataset)][1])

    def largest(loader: Any, batch: Any) -> _Largest | None:
        if id(loader) not in known:
            with _as_before():
                known[id(loader)] = loader, largest_of(loader)
            _tell(known[id(loader)][1], batch, assume)
        return known[id(loader)][1]

    replace(DataLoader, __iter__=lambda loader: _Batches(begin(loader), is_on, functools.partial(largest, loader)))


def _tell(largest: _Largest | None, batch: Any, assume: Assume) -> None:
    place = user_line()
    if largest is None:
        assume(
            place,
            "the largest batch of this data set is not known: it has no examples by number, or no batches of a known kind",
        )
    else:
        how_many = (
            f"{largest.num_seen:,} of {largest.num_examples:,}"
            if largest.num_seen < largest.num_examples
            else f"{largest.num_examples:,}"
        )
        assume(
            place,
            f"the last steps traced have the largest batch of {how_many} examples: {largest.num_elements:,} elements ({_shapes(largest.batch)}); the first one had {_num_elements(batch):,}",
        )


def _sizes_of_examples(dataset: Any) -> dict[int, int]:
    """The elements of each example by its number: of all, or of as many as there is time for, spread over the data set."""
    count = len(dataset)
    end = time.monotonic() + _MAX_SECONDS
    sizes: dict[int, int] = {}
    # Each round halves the distance between those that were looked at: whenever time is up, they are spread evenly.
    stride = 1 << max(0, count - 1).bit_length()
    while stride and len(sizes) < min(count, _MAX_EXAMPLES):
        for index in range(0, count, stride):
            if index not in sizes:
                sizes[index] = _num_elements(dataset[index])
                if time.monotonic() > end or len(sizes) >= _MAX_EXAMPLES:
                    return sizes
        stride //= 2
    return sizes


def _largest_batch(loader: Any, sizes: dict[int, int]) -> _Largest | None:
    sampler, dataset = loader.batch_sampler, loader.dataset
    if type(sampler) is BatchSampler and type(sampler.sampler) is RandomSampler:
        indices = sorted(sizes, key=lambda index: -sizes[index])[: sampler.batch_size]
    else:
        # It is asked for its batches once more; random states are put back afterwards.
        batches = [batch for batch, _ in zip(sampler, range(_MAX_EXAMPLES), strict=False)]
        indices = max(batches, key=lambda batch: _size([sizes.get(index, 0) for index in batch]), default=[])
    if not indices:
        return None
    batch = loader.collate_fn([dataset[index] for index in indices])
    if loader.pin_memory:
        batch = tree_map_only(torch.Tensor, torch.Tensor.pin_memory, batch)
    return _Largest(batch=batch, num_elements=_num_elements(batch), num_seen=len(sizes), num_examples=len(dataset))


def _size(sizes: Sequence[int]) -> tuple[int, int]:
    """What orders batches: examples that are padded are all as large as the largest; where they are joined, their sum decides."""
    return len(sizes) * max(sizes, default=0), sum(sizes)


def _num_elements(value: Any) -> int:
    """The elements of all tensors and arrays, or where there are none the numbers and characters."""
    leaves = tree_leaves(value)
    of_arrays = sum(math.prod(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor | np.ndarray))
    return of_arrays or sum(len(leaf) if isinstance(leaf, str | bytes) else 1 for leaf in leaves)


def _shapes(batch: Any) -> str:
    shapes = [
        "x".join(map(str, leaf.shape)) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()
    ]
    return ", ".join(dict.fromkeys(shapes)) or "no tensors"


@contextmanager
def _as_before() -> Iterator[None]:
    of_torch, of_python, of_numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        np.random.set_state(of_numpy)
