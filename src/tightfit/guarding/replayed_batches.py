"""Batches for steps that may be run twice: what was handed out in a step that failed is handed out again.

Making a batch draws random numbers (augmentation, the seed of workers), and is not done again: with a batch comes the random state that it left.
"""

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from tightfit.effects.random_states import AllRandom
from tightfit.effects.state import Snapshot

Batch = TypeVar("Batch")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """A batch, or the end of the batches, the random states after it was made, and what is known of it where it was made within a step."""

    batch: Any
    is_end: bool
    random: AllRandom
    drawn: Any


class DrawWatch(Protocol):
    """Of one attempt at a step."""

    def now(self) -> list[Snapshot]:
        """The state of what the step reaches."""
        ...

    def drew(self, before: list[Snapshot], batch: Any) -> Any:
        """A batch was made; `before` is the state before that. Returns what `hands_out` is given for it."""
        ...

    def hands_out(self, drawn: Any, *, is_again: bool) -> None:
        """The step gets it, made now or handed out again."""
        ...


class ReplayedBatches(Iterator[Batch], Generic[Batch]):
    """An iterator over `batches` that hands out its items since the last `begin` once more after `again`."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches: Iterator[Batch] = iter(batches) if not hasattr(type(batches), "__next__") else batches  # type: ignore[assignment]
        self.is_drawing = False
        """Whether a batch is being made."""
        self.is_broken = False
        """Whether an error has ended the making of a batch since `begin`: what makes them cannot be asked for that one again."""
        self.watch: DrawWatch | None = None
        """Looks at what a step is handed, from its beginning on."""
        self._given: list[_Given] = []
        self._waiting: deque[_Given] = deque()

    def __iter__(self) -> "ReplayedBatches[Batch]":
        return self

    def __next__(self) -> Batch:
        if self._waiting:
            given = self._waiting.popleft()
            given.random.put()
            if given.drawn is not None and self.watch is not None:
                self.watch.hands_out(given.drawn, is_again=True)
        else:
            given = self._drawn()
        self._given.append(given)
        if given.is_end:
            raise StopIteration
        return given.batch

    def _drawn(self) -> _Given:
        before = None if self.watch is None else self.watch.now()
        batch, is_end = None, False
        self.is_drawing = True
        try:
            batch = next(self._batches)
        except StopIteration:
            is_end = True
        except BaseException:
            self.is_broken = True
            raise
        finally:
            self.is_drawing = False
        random = AllRandom.now()
        if self.watch is None or before is None:
            return _Given(batch=batch, is_end=is_end, random=random, drawn=None)
        drawn = self.watch.drew(before, batch)
        self.watch.hands_out(drawn, is_again=False)
        return _Given(batch=batch, is_end=is_end, random=random, drawn=drawn)

    @property
    def is_waiting(self) -> bool:
        """Whether there are batches to be handed out again."""
        return bool(self._waiting)

    def begin(self, watch: DrawWatch | None = None) -> None:
        """A step begins: what was handed out before is let go."""
        self.watch = watch
        self._given.clear()
        self.is_broken = False

    def again(self) -> None:
        """The step failed: its batches come again, in their order."""
        self._waiting.extendleft(reversed(self._given))
        self._given.clear()
