"""Notes which data loaders a traced program takes batches from, and how long reading and collating a batch takes: in the main process, or in a worker.

Data loading is real in a trace, so its time is that of this machine, with what watching the operators of host tensors adds to it. A worker is a fork, and tells its
times by memory that both have.
"""

import dataclasses
import mmap
import os
import struct
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, default_collate, get_worker_info

from tightfit.capture.observe.attribution import user_line
from tightfit.capture.observe.recorder import Recorder
from tightfit.capture.patches.manifest import FETCHER, ITERABLE_FETCHER, LOADER_ITERATOR, MAP_FETCHER
from tightfit.capture.replace import replace
from tightfit.tape.loader_use import LoaderUse

_NUM_KEPT = 64
"""How many times of each process are kept."""
_NUMBER = struct.Struct("d")
# Of these it is known that asking for their length changes nothing.
_SAMPLERS = (SequentialSampler, RandomSampler)


class _Times:
    """Seconds of batches, in memory that forks share: the main process and each worker has a row of its own, which begins with how many it has."""

    def __init__(self, num_workers: int) -> None:
        self._num_rows = num_workers + 1
        self._shared = mmap.mmap(-1, self._num_rows * (1 + _NUM_KEPT) * _NUMBER.size)
        self._process = os.getpid()

    def add(self, seconds: float) -> None:
        """A batch that this process has loaded."""
        worker = None if os.getpid() == self._process else get_worker_info()
        row = 0 if worker is None else 1 + int(worker.id)
        begin = row * (1 + _NUM_KEPT)
        if row >= self._num_rows or (count := int(self._at(begin))) >= _NUM_KEPT:
            return
        _NUMBER.pack_into(self._shared, (begin + 1 + count) * _NUMBER.size, seconds)
        _NUMBER.pack_into(self._shared, begin * _NUMBER.size, count + 1)

    def all(self) -> tuple[float, ...]:
        """What all processes have added."""
        begins = (row * (1 + _NUM_KEPT) for row in range(self._num_rows))
        return tuple(self._at(begin + 1 + place) for begin in begins for place in range(int(self._at(begin))))

    def _at(self, place: int) -> float:
        return _NUMBER.unpack_from(self._shared, place * _NUMBER.size)[0]


@dataclasses.dataclass(slots=True, kw_only=True)
class _Seen:
    use: LoaderUse
    times: _Times
    batches: list[int] = dataclasses.field(default_factory=list)
    examples: list[int] = dataclasses.field(default_factory=list)
    is_stacked: bool


def _num_examples(loader: Any) -> int | None:
    # A loader with batches of the program's own has a sampler that nobody asks, for a data set that may have no length.
    is_asked = loader.batch_size is not None and type(loader.sampler) in _SAMPLERS
    return len(loader.sampler) if is_asked else None


def _examples_of(batch: Any, seen: _Seen) -> int:
    """How many examples a batch has, 0 if that is not plain: the rows that all its tensors have, where torch stacked them or they are as many as the loader was asked for."""
    rows = set(_rows(batch))
    if len(rows) != 1:
        return 0
    num_rows = rows.pop()
    return num_rows if seen.is_stacked or num_rows == seen.use.batch_size else 0


def _rows(batch: Any) -> Iterator[int]:
    if isinstance(batch, torch.Tensor):
        yield batch.shape[0] if batch.dim() else 0
    elif isinstance(batch, Mapping):
        for each in batch.values():
            yield from _rows(each)
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        for each in batch:
            yield from _rows(each)


class LoadingTimes:
    """The loaders that the program has begun to iterate, in that order."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._seen: list[_Seen] = []
        self._of_loader: weakref.WeakKeyDictionary[Any, _Seen] = weakref.WeakKeyDictionary()
        self._of_iterator: weakref.WeakKeyDictionary[Any, _Seen] = weakref.WeakKeyDictionary()
        self._of_fetcher: weakref.WeakKeyDictionary[Any, _Times] = weakref.WeakKeyDictionary()
        # While an iterator is made, in which its workers are forked too.
        self._beginning: _Times | None = None

    def install(self) -> None:
        """Watches loaders from now on."""
        begin, make_fetcher, next_of = DataLoader.__iter__, FETCHER.value().__init__, LOADER_ITERATOR.value().__next__

        def begun(loader: Any) -> Any:
            seen = self._seen_of(loader)
            before, self._beginning = self._beginning, seen.times
            try:
                iterator = begin(loader)
            finally:
                self._beginning = before
            self._of_iterator[iterator] = seen
            return iterator

        def made(fetcher: Any, *args: Any, **kwargs: Any) -> None:
            make_fetcher(fetcher, *args, **kwargs)
            if self._beginning is not None:
                self._of_fetcher[fetcher] = self._beginning

        def taken(iterator: Any) -> Any:
            batch = next_of(iterator)
            seen = self._of_iterator.get(iterator)
            if seen is not None:
                seen.batches.append(self._recorder.num_operators)
                seen.examples.append(_examples_of(batch, seen))
            return batch

        replace(DataLoader, __iter__=begun)
        replace(LOADER_ITERATOR.value(), __next__=taken)
        replace(FETCHER.value(), __init__=made)
        for fetcher in (MAP_FETCHER.value(), ITERABLE_FETCHER.value()):
            replace(fetcher, fetch=self._timed(fetcher.fetch))

    def uses(self) -> tuple[LoaderUse, ...]:
        """What was seen."""
        return tuple(
            dataclasses.replace(
                seen.use, batches=tuple(seen.batches), load_seconds=seen.times.all(), examples=tuple(seen.examples)
            )
            for seen in self._seen
        )

    def _seen_of(self, loader: Any) -> _Seen:
        seen = self._of_loader.get(loader)
        if seen is None:
            use = LoaderUse(
                line=user_line(),
                num_workers=loader.num_workers,
                pins_memory=bool(loader.pin_memory),
                prefetch_factor=loader.prefetch_factor,
                is_persistent=bool(loader.persistent_workers),
                batch_size=loader.batch_size,
                num_examples=_num_examples(loader),
            )
            # Without a batch size, the data set's items are batches, or a sampler of the program's own makes them.
            is_stacked = loader.collate_fn is default_collate
            seen = _Seen(use=use, times=_Times(loader.num_workers), is_stacked=is_stacked)
            self._of_loader[loader] = seen
            self._seen.append(seen)
        return seen

    def _timed(self, fetch: Callable[..., Any]) -> Callable[..., Any]:
        def timed(fetcher: Any, indices: Any) -> Any:
            begin = time.perf_counter()
            batch = fetch(fetcher, indices)
            times = self._of_fetcher.get(fetcher)
            if times is not None:
                times.add(time.perf_counter() - begin)
            return batch

        return timed
