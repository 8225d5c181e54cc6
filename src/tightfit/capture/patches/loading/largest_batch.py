"""Hands a traced program the largest batch that its data loaders can give, from some step on: a run that fits in its first steps may fail late, in the
step of its longest sample.

The data set is looked through before (`tightfit.capture.patches.loading.largest_batches`). Random states are afterwards what they were.
"""

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from tightfit.capture.observe.attribution import user_line
from tightfit.capture.patches.loading.largest_batches import (
    LargestBatch,
    can_be_looked_through,
    largest_batch,
    num_elements,
    shapes_of,
    sizes_of_examples,
)
from tightfit.capture.replace import replace

Assume = Callable[[str, str], None]


class _Batches:
    """An iterator over a loader's batches, or its largest one in place of each that is smaller. For the rest it is the loader's own."""

    def __init__(self, own: Any, is_on: Callable[[], bool], largest: Callable[[Any], LargestBatch | None]) -> None:
        self._own = own
        self._is_on = is_on
        self._largest = largest

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._own)
        largest = self._largest(batch) if self._is_on() else None
        return batch if largest is None or largest.num_elements <= num_elements(batch) else largest.batch

    def __len__(self) -> int:
        return len(self._own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def install(is_on: Callable[[], bool], assume: Assume) -> None:
    """From when `is_on` is true, each batch of a loader is its largest one, where that is larger. `assume` is told once for each loader."""
    begin = DataLoader.__iter__
    # By the identity of what they are of, which they hold, so that no other one gets its number: the loader, and the data set.
    known: dict[int, tuple[Any, LargestBatch | None]] = {}
    sizes: dict[int, tuple[Any, dict[int, int]]] = {}

    def largest_of(loader: Any) -> LargestBatch | None:
        if not can_be_looked_through(loader):
            return None
        dataset = loader.dataset
        if id(dataset) not in sizes:
            sizes[id(dataset)] = dataset, sizes_of_examples(dataset)
        return largest_batch(loader, sizes[id(dataset)][1])

    def largest(loader: Any, batch: Any) -> LargestBatch | None:
        if id(loader) not in known:
            with _as_before():
                known[id(loader)] = loader, largest_of(loader)
            _tell(known[id(loader)][1], batch, assume)
        return known[id(loader)][1]

    replace(DataLoader, __iter__=lambda loader: _Batches(begin(loader), is_on, functools.partial(largest, loader)))


def _tell(largest: LargestBatch | None, batch: Any, assume: Assume) -> None:
    place = user_line()
    if largest is None:
        assume(
            place,
            "the largest batch of this data set is not known: it has no examples by number, or no batches of a known kind",
        )
    else:
        assume(
            place,
            f"the last steps traced have the largest batch of {largest.among()} examples: {largest.num_elements:,} elements ({shapes_of(largest.batch)}); the first one had {num_elements(batch):,}; the largest example is number {largest.largest_example:,}",
        )


@contextmanager
def _as_before() -> Iterator[None]:
    of_torch, of_python, of_numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        np.random.set_state(of_numpy)
