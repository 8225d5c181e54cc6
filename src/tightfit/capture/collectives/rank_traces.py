"""Traces one rank of a program whose ranks send each other Python objects: the others are traced as far as they send what it waits for."""

import dataclasses
from collections.abc import Callable

from tightfit.capture.collectives.channels import sender_of
from tightfit.capture.collectives.world import World
from tightfit.errors import CaptureError, WaitsForRank

Attempt = Callable[[World], object]


class RankTraces:
    """What the ranks of one program have sent, as far as they were traced. Each rank that others wait for is traced once for each object that it waits for itself."""

    def __init__(self) -> None:
        self._sent: dict[str, list[str]] = {}
        self._waiting: list[tuple[str, int]] = []

    def trace(self, attempt: Attempt, world: World) -> object:
        """The answer of `attempt` for `world`, with what other ranks send in it.

        Raises:
            CaptureError: ranks wait for each other, or for what nobody sends; or one of them could not be traced.
        """
        while True:
            try:
                return attempt(dataclasses.replace(world, received=self._sent))
            except WaitsForRank as error:
                self._keep(error)
                if not error.channel:
                    return None
                self._obtain(attempt, world, error)

    def _obtain(self, attempt: Attempt, world: World, error: WaitsForRank) -> None:
        wanted, sender = (error.channel, error.index), sender_of(error.channel)
        if wanted in self._waiting:
            raise CaptureError(f"{error}; rank {sender} itself waits for it to send something first")
        if not 0 <= sender < world.num_ranks:
            raise CaptureError(f"{error}; there is no rank {sender} among {world.num_ranks}")
        self._waiting.append(wanted)
        try:
            self.trace(attempt, dataclasses.replace(world, rank=sender, ends_after=(error.channel, error.index + 1)))
        finally:
            self._waiting.pop()
        if len(self._sent.get(error.channel, ())) <= error.index:
            raise CaptureError(f"{error}, and rank {sender} does not send one")

    def _keep(self, error: WaitsForRank) -> None:
        for channel, objects in error.sent.items():
            if len(objects) > len(self._sent.get(channel, ())):
                self._sent[channel] = objects
