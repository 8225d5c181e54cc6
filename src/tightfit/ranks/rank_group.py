"""The ranks of one run, which all do the same in the same order, and are compared with each other."""

import contextlib
import functools
import operator
import os
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tightfit.errors import TightfitError
from tightfit.ranks.rank_errors import RankLost, RanksDiffer
from tightfit.ranks.rank_links import RankLinks
from tightfit.ranks.rank_signals import RankSignals

_NUM_FIELDS = 8
# What ranks may be about to do when they meet, by the number that stands for it.
_ALL_MEETINGS = ("a forward pass", "the end of a forward pass", "a backward pass", "an optimizer's step", "the states of an optimizer", "the end of the script")  # fmt: skip


class RankGroup:
    """This process among `size` ranks, each with a card where `on_cards`."""

    def __init__(self, store: Any, rank: int, size: int, *, on_cards: bool) -> None:
        self.rank, self.size, self.on_cards = rank, size, on_cards
        self.links = RankLinks(store, rank, size, on_cards=on_cards)
        self.signals = RankSignals()
        self._num_inside, self._process = 0, os.getpid()
        # Whether all ranks were through the last meeting.
        self.has_left = False

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Within a part: models that are called there have its rows, and are not divided once more."""
        self._num_inside += 1
        try:
            yield
        finally:
            self._num_inside -= 1

    @property
    def is_inside(self) -> bool:
        """Whether a part is under way. A process that the script has forked is no rank: what it trains it trains whole."""
        return bool(self._num_inside) or os.getpid() != self._process

    @property
    def failure(self) -> TightfitError | None:
        """The first error, which a program may have swallowed."""
        return self.links.failure

    def agree(self, meeting: str, fields: Mapping[str, int]) -> None:
        """Waits for all ranks, and compares these numbers, whose names say what they are of.

        Raises:
            RanksDiffer: on all ranks, if one has other numbers, or is elsewhere.
            RankLost: one has ended.
        """
        names = list(fields)
        assert len(names) < _NUM_FIELDS
        numbers = [_ALL_MEETINGS.index(meeting), *fields.values()]
        numbers += [0] * (_NUM_FIELDS - len(numbers))
        mine = torch.tensor([*numbers, self.signals.before_meeting()], dtype=torch.int64)
        rows = [row.tolist() for row in self.links.of_each(mine)]
        for rank, row in enumerate(rows):
            if row[0] != rows[0][0]:
                self.links.fail(RanksDiffer(
                    f"the ranks diverged: rank 0 is at {_ALL_MEETINGS[rows[0][0]]}, rank {rank} at {_ALL_MEETINGS[row[0]]}; "
                    "each must run the same steps, whatever the time, the process or unseeded random numbers are"
                ))  # fmt: skip
            for name, number, first in zip(names, row[1:], rows[0][1:], strict=False):
                if number != first:
                    self.links.fail(RanksDiffer(
                        f"{name} must be the same on all ranks, and rank {rank} has not what rank 0 has: seed what draws random numbers, "
                        "with what is no time and no number of a process"
                    ))  # fmt: skip
        if meeting == _ALL_MEETINGS[0]:
            self.signals.after_meeting(functools.reduce(operator.or_, (row[-1] for row in rows)))

    def leave(self) -> None:
        """After the last meeting: no rank ends, and closes its connections, before all are through that."""
        with contextlib.suppress(RankLost):
            self.links.of_each(torch.zeros(1, dtype=torch.int64))
        self.has_left = True


def number_of(text: object) -> int:
    """A number for what can be written as text, the same in all processes."""
    return zlib.crc32(repr(text).encode())
