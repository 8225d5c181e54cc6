"""Says once that proofs are repeated in one step after the other: for a program that gives torch another number each time (a loss weight that is annealed in
the model), since a number may be taken from the number of rows."""

import contextlib
import time
from collections.abc import Hashable, Iterator

# A change that comes late, or ways that are taken by turns, are few.
_MANY = 8
_MAX_KEYS = 256


class RepeatedProofs:
    """Counts the proofs of one technique for what was proved before; `notes` are those of the session."""

    def __init__(self, technique: str, notes: list[str]) -> None:
        self._technique = technique
        self._notes = notes
        self._seconds: dict[Hashable, list[float]] = {}

    @contextlib.contextmanager
    def counted(self, subject: Hashable) -> Iterator[None]:
        """Around a proof for `subject`, which says what is run and on which sizes."""
        begin = time.monotonic()
        yield
        if len(self._seconds) >= _MAX_KEYS:
            self._seconds.clear()
        taken = self._seconds.setdefault(subject, [])
        taken.append(time.monotonic() - begin)
        told = f"{self._technique} repeats its check in every step"
        if len(taken) == _MANY and not any(note.startswith(told) for note in self._notes):
            self._notes.append(
                f"{told} ({sum(taken) / _MANY:.2f} s each time), because the code passes torch other numbers, or "
                "changes its own state, in each step: keep a number that changes from step to step in a buffer (a "
                "tensor), which needs no new check"
            )
