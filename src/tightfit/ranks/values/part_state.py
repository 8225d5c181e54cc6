"""The state of a model around the runs of its part: what a run has left behind is taken back, or said."""

import contextlib
import weakref
from collections.abc import Callable, Iterator

import torch

from tightfit.effects.independence.left_tensors import LeftTensor, left_tensors
from tightfit.effects.random_states import TorchRandom
from tightfit.effects.state import DRAWN, RegionState, Snapshot, differences, restore
from tightfit.effects.values.copied_buffers import BufferValues, CopiedBuffers, in_copies
from tightfit.techniques.wrappers.first_order import Refuse


class PartState:
    """The state of one model, which it refers to weakly, before the run that is under way, with that of all generators. `refuse` makes the error to raise."""

    def __init__(self, model: torch.nn.Module, refuse: Refuse) -> None:
        self._model = weakref.ref(model)
        self._refuse = refuse
        self._state = RegionState()
        self._before: Snapshot | None = None
        self._random = TorchRandom.now()
        self._buffers: BufferValues | None = None
        # Whether the forward is known, or not yet known not, to write to buffers.
        self._writes_buffers = True
        self.left = ""
        """What a run that was ended by an exception has left behind, which cannot be taken back, in words."""

    def _owner(self) -> torch.nn.Module:
        model = self._model()
        assert model is not None
        return model

    def _now(self) -> Snapshot:
        return self._state.snapshot(self._owner())

    def begin(self) -> None:
        """A run begins."""
        self._before, self._random = self._now(), TorchRandom.now()
        self._buffers = BufferValues(self._owner(), has_all=self._writes_buffers)

    def put_back(self, *, has_raised: bool = False) -> None:
        """Takes back what the run has done. Where a part `has_raised` an exception, what cannot be taken back is kept in `left`."""
        assert self._before is not None and self._buffers is not None
        restore(self._before)
        if not self._buffers.put() and not has_raised:
            raise self._refuse(
                "the model writes to a large buffer in a forward that is run once more, since parts decide otherwise by their values"
            )
        self._random.put()
        if has_raised:
            self._note_left(self._before, self._buffers)

    def _note_left(self, before: Snapshot, known: BufferValues | None = None) -> None:
        changed = differences(before, self._now())
        # What was put back has been written to again.
        self.left = next((str(each) for each in changed if known is None or not known.knows(each.tensor)), "")

    def left_tensors(self) -> list[LeftTensor]:
        """The tensors that the run has put where they can be reached."""
        assert self._before is not None
        return list(left_tensors(self._before, self._now()))

    def end(self) -> None:
        """The run is over: what was there before it is not kept alive."""
        if self._buffers is not None:
            self._writes_buffers = self._buffers.is_any_written()
        self._before = self._buffers = None

    def has_moved(self) -> bool:
        """Whether the run has drawn random numbers, or written to buffers."""
        assert self._before is not None and self._buffers is not None
        if self._buffers.is_any_written():
            return True
        found = differences(self._before, self._now())
        return any(each.what == DRAWN for each in found) or not TorchRandom.now().is_same(self._random)

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        """The model's state, and that of generators, is that of before the run, for a block."""
        now, random = self._now(), TorchRandom.now()
        assert self._before is not None and self._buffers is not None
        restore(self._before)
        self._random.put()
        try:
            with in_copies(self._owner(), self._buffers.copies()):
                yield
        finally:
            restore(now)
            random.put()

    @contextlib.contextmanager
    def unseen(self) -> Iterator[Callable[[], list[LeftTensor]]]:
        """Around what runs beside the program: the model's state is that of before. The yielded function gives the tensors that were put where they can be reached."""
        before, copied = self._now(), CopiedBuffers(self._owner())

        def left() -> list[LeftTensor]:
            copied.take_out()
            return list(left_tensors(before, self._now()))

        caches = [(path, cache, cache.cache_info().misses) for path, cache in before.reach.caches]
        try:
            yield left
        except Exception:
            copied.take_out()
            restore(before)
            self._note_left(before)
            raise
        finally:
            copied.take_out()
            changed = differences(before, self._now())
            restore(before)
            filled = [path for path, cache, misses in caches if cache.cache_info().misses != misses]
        if changed and filled:
            raise self._refuse(
                f"{filled[0]} was filled and {changed[0]} in one forward, which a comparison cannot take back"
            )
