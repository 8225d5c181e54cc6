"""What a thread has waited for of the work of others on the GPU, where one of them runs a model.

In a trace threads take turns; on a card they run at once. Both hold the same at every moment where each piece of work comes behind all that other threads
did before it: behind the start of its thread, the end of another one, or something that another one has handed over (an item of a queue, an event, the
result of a future). Threads that only move batches are let off: how far they are ahead is an assumption that is said.
"""

import dataclasses
from collections.abc import Callable
from typing import NoReturn, Protocol

from tightfit.capture.observe.recorder import Recorder
from tightfit.capture.patches.threads_followed.turns import Member
from tightfit.errors import CaptureError

Clock = dict[Member, int]
"""For each thread, up to which of its rows on the tape its work is known to be done."""


class TurnsTaken(Protocol):
    """Tells whose turn it is; `tightfit.capture.patches.threads_followed.turns.TurnMembers`."""

    def own(self) -> Member | None:
        """The thread that calls, if it takes turns."""
        ...


@dataclasses.dataclass(slots=True)
class _Work:
    """Of a thread: its last row on the tape, what it knows of others, whether all that it did since it last handed something over was to free memory, and whether it
    waits inside of a model's call, a backward pass or an optimizer's step."""

    last: int = 0
    known: Clock = dataclasses.field(default_factory=dict)
    has_sent: bool = False
    runs_a_model: bool = False
    is_inside: bool = False


class ThreadOrder:
    """The order of what threads do on the GPU. `where` is the program's line that is running; `on_failed` is told of a refusal, which the program may swallow."""

    def __init__(
        self,
        recorder: Recorder,
        members: TurnsTaken,
        where: Callable[[], str],
        on_failed: Callable[[CaptureError], None],
    ) -> None:
        self._recorder = recorder
        self._members = members
        self._where = where
        self._on_failed = on_failed
        self._work: dict[Member, _Work] = {}
        self._model_line = ""
        self._rows, self._made = self._counted()
        self.failed: CaptureError | None = None

    def runs_a_model(self) -> None:
        """The thread that calls, which takes turns, is about to run a model."""
        member = self._members.own()
        if member is None:
            self._refuse()
        of_it = self._of(member)
        if not of_it.runs_a_model:
            of_it.runs_a_model, self._model_line = True, self._where()
        self.settle(member)

    def settle(self, member: Member) -> None:
        """Whoever had the turn until now is `member`: looks whether what it has done since the last look may come then.

        Raises:
            CaptureError: another thread may do its work at the same time.
        """
        if self.failed is not None:
            raise self.failed
        rows, made = self._counted()
        if rows == self._rows:
            return
        of_it = self._of(member)
        for other, work in self._work.items():
            is_beside = other is not member and (work.is_inside or work.last > of_it.known.get(other, 0))
            if is_beside and (of_it.runs_a_model or work.runs_a_model):
                self._refuse()
        # What is freed right behind what was handed over, before anybody else has the turn, counts as done with it.
        if made != self._made or not of_it.has_sent:
            of_it.last = rows
            of_it.has_sent = False
        self._rows, self._made = rows, made

    def clock(self, member: Member) -> Clock:
        """What is known behind all that `member`, whose turn it is, has done so far."""
        self.settle(member)
        of_it = self._of(member)
        return {**of_it.known, member: of_it.last}

    def sent(self) -> Clock:
        """What whoever gets something of the thread that calls knows with it."""
        member = self._members.own()
        if member is None:
            return {}
        clock = self.clock(member)
        self._of(member).has_sent = True
        return clock

    def got(self, clock: Clock | None) -> None:
        """The thread that calls has got something that was handed over with `clock`."""
        member = self._members.own()
        if member is not None and clock:
            self.learn(member, clock)

    def learn(self, member: Member, clock: Clock) -> None:
        """`member` comes behind what `clock` says."""
        if self._members.own() is member:
            self.settle(member)
        known = self._of(member).known
        for other, row in clock.items():
            known[other] = max(row, known.get(other, 0))

    def switched(self, before: Member, after: Member, *, is_inside: bool) -> None:
        """The turn of `before` is over, and that of `after` begins. `is_inside`: `before` waits inside of a model's call, a backward pass or an optimizer's step."""
        self.settle(before)
        self._of(before).has_sent = False
        self._of(before).is_inside, self._of(after).is_inside = is_inside, False

    def _of(self, member: Member) -> _Work:
        return self._work.setdefault(member, _Work())

    def _counted(self) -> tuple[int, int]:
        """Rows of work so far, and those of them that free nothing."""
        recorder = self._recorder
        made = recorder.num_operators + len(recorder.storages["num_bytes"])
        return made + len(recorder.events["kind"]), made

    def _refuse(self) -> NoReturn:
        strings, lines = self._recorder.strings.texts, self._recorder.operators["line"]
        place = strings[int(lines[-1])] if lines else ""
        self.failed = CaptureError(
            f"{self._model_line or 'the program'} runs a model in a thread of its own, while another thread uses the GPU{f' ({place})' if place else ''}: what "
            "both hold at once depends on how fast each is; wait for the thread first (`thread.join()`), at least while it is traced"
        )
        self._on_failed(self.failed)
        raise self.failed
