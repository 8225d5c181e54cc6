"""The state of a model around the runs of its part: what a run has left behind is taken back, or said."""

import contextlib
import weakref
from collections.abc import Callable, Iterator

import torch

from tightfit.effects.independence.left_tensors import LeftTensor, left_tensors
from tightfit.effects.random_states import TorchRandom
from tightfit.effects.state import DRAWN, RegionState, Snapshot, differences, restore
from tightfit.techniques.wrappers.first_order import Refuse


class PartState:
    """The state of one model, which it refers to weakly, before the run that is under way, with that of all generators. `refuse` makes the error to raise."""

    def __init__(self, model: torch.nn.Module, refuse: Refuse) -> None:
        self._model = weakref.ref(model)
        self._refuse = refuse
        self._state = RegionState()
        self._before: Snapshot | None = None
        self._random = TorchRandom.now()
        self.left = ""
        """What a run that was ended by an exception has left behind, which cannot be taken back, in words."""

    def _now(self) -> Snapshot:
        model = self._model()
        assert model is not None
        return self._state.snapshot(model)

    def begin(self) -> None:
        """A run begins."""
        self._before, self._random = self._now(), TorchRandom.now()

    def put_back(self, *, has_raised: bool = False) -> None:
        """Takes back what the run has done. Where a part `has_raised` an exception, what cannot be taken back is kept in `left`."""
        assert self._before is not None
        restore(self._before)
        self._random.put()
        if has_raised:
            self._note_left(self._before)

    def _note_left(self, before: Snapshot) -> None:
        self.left = next(map(str, differences(before, self._now())), "")

    def left_tensors(self) -> list[LeftTensor]:
        """The tensors that the run has put where they can be reached."""
        assert self._before is not None
        return list(left_tensors(self._before, self._now()))

    def end(self) -> None:
        """The run is over: what was there before it is not kept alive."""
        self._before = None

    def has_drawn(self) -> bool:
        """Whether the run has drawn random numbers."""
        assert self._before is not None
        found = differences(self._before, self._now())
        return any(each.what == DRAWN for each in found) or not TorchRandom.now().is_same(self._random)

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        """The model's state, and that of generators, is that of before the run, for a block."""
        now, random = self._now(), TorchRandom.now()
        self.put_back()
        try:
            yield
        finally:
            restore(now)
            random.put()

    @contextlib.contextmanager
    def unseen(self) -> Iterator[Callable[[], list[LeftTensor]]]:
        """Around what runs beside the program: the model's state is that of before. The yielded function gives the tensors that were put where they can be reached."""
        before = self._now()
        caches = [(path, cache, cache.cache_info().misses) for path, cache in before.reach.caches]
        try:
            yield lambda: list(left_tensors(before, self._now()))
        except Exception:
            restore(before)
            self._note_left(before)
            raise
        finally:
            changed = differences(before, self._now())
            restore(before)
            filled = [path for path, cache, misses in caches if cache.cache_info().misses != misses]
        if changed and filled:
            raise self._refuse(
                f"{filled[0]} was filled and {changed[0]} in one forward, which a comparison cannot take back"
            )
