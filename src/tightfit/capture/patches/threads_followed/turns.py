"""Threads take turns: one runs at a time, until it waits for another one. What a program with threads does is then the same each time.

All that Python's threads wait with (conditions, events, queues, pools) is made of locks, so that locks which pass the turn on are enough. Whose turn is
next is decided by the thread that waits, from what the others wait for: threads in the order in which they were started, and the main thread when all of
them wait. A thread that prepares batches is therefore as far ahead as its queue lets it, as it is beside a GPU that is busy.
"""

import _thread
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tightfit.errors import faults

_SECONDS_BETWEEN_LOOKS = 0.001
_SECONDS_IN_VAIN = 2.0
_real_sleep = time.sleep
# What Python's table of threads has for a thread that it has not started: nothing, or a stand-in once somebody has asked for the current thread.
_OF_C = (type(None), threading._DummyThread)  # type: ignore[attr-defined]


def _always() -> bool:
    return True


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class Member:
    """A thread that takes turns. `can_run` says whether what it waits for is there, `deadline` when it stops waiting; `context` is the caller's."""

    wake: Any = dataclasses.field(default_factory=_thread.allocate_lock)
    can_run: Callable[[], bool] = _always
    deadline: float | None = None
    context: Any = None
    has_ended: bool = False

    def __post_init__(self) -> None:
        self.wake.acquire()

    def begin(self) -> None:
        """Waits for the first turn."""
        self.wake.acquire()


class ThreadEnded(SystemExit):
    """Ends a thread where it waits: nothing will come any more."""


class TurnMembers:
    """The threads that take turns: `main`, the one that makes this, and others. `is_in_backward`: whether the thread that calls is within a backward pass."""

    def __init__(self, is_in_backward: Callable[[], bool]) -> None:
        self.main = Member()
        self.others: list[Member] = []
        """All but the main thread, in the order in which they were started."""
        self._by_thread: dict[int, Member] = {_thread.get_ident(): self.main}
        self._aside: set[int] = set()
        self._is_in_backward = is_in_backward

    def forget(self) -> None:
        """No thread takes turns here: this is a process that was forked, which has none of the others."""
        self._by_thread.clear()
        self.others.clear()

    def own(self) -> Member | None:
        """The member that this thread is. One of autograd's runs a hook in the turn of the main thread, which waits in C for the end of the backward pass."""
        number = _thread.get_ident()
        member = self._by_thread.get(number)
        if member is None and self.others and number not in self._aside and self._is_in_backward():
            is_of_python = not isinstance(threading._active.get(number), _OF_C)  # type: ignore[attr-defined]
            return None if is_of_python else self.main
        return member

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """This thread, whose turn it stays, waits in here as other threads do."""
        number = _thread.get_ident()
        member = self._by_thread.pop(number, None)
        self._aside.add(number)
        try:
            yield
        finally:
            self._aside.discard(number)
            if member is not None:
                self._by_thread[number] = member

    def enter(self, member: Member) -> None:
        """This thread takes turns from now on, and its first one later, with `Member.begin`."""
        self._by_thread[_thread.get_ident()] = member
        self.others.append(member)

    def leave(self, member: Member) -> None:
        """This thread takes no more turns."""
        del self._by_thread[_thread.get_ident()]
        self.others.remove(member)
        member.has_ended = True


class Turns:
    """The threads that take turns, beginning with the one that makes this, the main thread. `switch(before, after)` is called at each change of turns, in the
    thread whose turn it was. `on_outside` is called in another thread than the main one that has waited for one which
    takes no turns. `ask` is called in the main thread, with whether others only wait for time to pass, where it has waited in vain for a while.
    `is_in_backward`: whether the thread that calls is within a backward pass."""

    def __init__(
        self,
        switch: Callable[[Member, Member], None],
        on_outside: Callable[[], None],
        ask: Callable[[bool], None],
        is_in_backward: Callable[[], bool],
    ) -> None:
        self.members = TurnMembers(is_in_backward)
        self._switch = switch
        self._on_outside = on_outside
        self._ask = ask
        self.main_goes_on = False
        """Whether the main thread keeps its turn until it waits, also where others could run: it is through with what it does before a model is."""
        self.must_ask = False
        """Whether the main thread is to be asked as soon as the running one waits or ends."""
        self._in_vain_since: float | None = None
        self._ends_others = False
        # A thread that ended has left it to the main thread, which waits, to see who can run.
        self._main_chooses = False

    def leave(self, member: Member) -> None:
        """This thread, whose turn it is, takes no more turns."""
        self.members.leave(member)
        # It does not stay to see who can run: others may wait for its very end (`Thread.join`).
        chosen = None if self.must_ask else self._ready()
        self._main_chooses = chosen is None
        chosen = chosen or self.members.main
        self._switch(member, chosen)
        chosen.wake.release()

    def wait(self, can_run: Callable[[], bool], timeout: float | None = None) -> None:
        """Lets others run until `can_run`, or for as long as they can run without this one, and then until `timeout` seconds have passed."""
        member = self.members.own()
        assert member is not None
        member.can_run = can_run
        member.deadline = None if timeout is None else time.monotonic() + timeout
        self._pass_on(member)
        while member is self.members.main and self._main_chooses:
            self._main_chooses = False
            self._pass_on(member)
        member.can_run, member.deadline = _always, None
        if member is not self.members.main:
            if self._ends_others:
                raise ThreadEnded
        elif self.must_ask:
            self.must_ask = False
            self._ask(any(m.deadline is not None for m in self.members.others))

    def _pass_on(self, member: Member) -> None:
        chosen = self._chosen()
        if chosen is not member:
            self._switch(member, chosen)
            chosen.wake.release()
            member.wake.acquire()

    def came_from_outside(self) -> None:
        """What the running thread has waited for was done by one that takes no turns."""
        if self.members.own() is not self.members.main:
            self._on_outside()

    def end_others(self) -> bool:
        """Ends each other thread where it waits; False where that has been tried before, or there is none."""
        is_new = bool(self.members.others) and not self._ends_others
        self._ends_others = True
        return is_new

    def let_others_run(self) -> None:
        """The main thread has done something that others may wait for."""
        if (
            self.members.others
            and not self.main_goes_on
            and self.members.own() is self.members.main
            and any(member.can_run() for member in self.members.others)
        ):
            self.wait(_always)

    def _ready(self) -> Member | None:
        for member in (*self.members.others, self.members.main):
            if member.can_run() or (self._ends_others and member is not self.members.main):
                return member
        return None

    def _chosen(self) -> Member:
        """Whose turn is next. While all wait, for what other threads or processes do or for the time to pass, so does the thread that asks."""
        while not self.must_ask:
            now = time.monotonic()
            ready = self._ready()
            if ready is not None:
                self._in_vain_since = None
                return ready
            first = min(
                (m for m in (*self.members.others, self.members.main) if m.deadline is not None),
                key=lambda m: m.deadline or 0.0,
                default=None,
            )
            # Threads that look again and again bring nothing either.
            if self.members.main.deadline is None:
                self._in_vain_since = since = now if self._in_vain_since is None else self._in_vain_since
                if now > since + _SECONDS_IN_VAIN:
                    self.must_ask, self._in_vain_since = True, None
                    break
            if first is not None and first.deadline is not None and first.deadline <= now:
                return first
            _real_sleep(_SECONDS_BETWEEN_LOOKS)
        return self.members.main


class TurnLock:
    """A lock as `threading.Lock` gives it, for which a member of `turns` waits by passing its turn on; other threads wait as ever."""

    turns: Turns

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()
        self._num_waiting = 0
        self._was_released_outside = False

    @faults.hands_over
    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As the method of `threading.Lock`."""
        turns = self.turns
        if turns.members.own() is None:
            return self._lock.acquire(blocking, timeout)
        if self._lock.acquire(False):
            return True
        if not blocking:
            return False
        end = None if timeout < 0 else time.monotonic() + timeout
        while True:
            self._num_waiting += 1
            try:
                turns.wait(self._is_free, None if end is None else end - time.monotonic())
            finally:
                self._num_waiting -= 1
            if self._was_released_outside:
                self._was_released_outside = False
                turns.came_from_outside()
            if self._lock.acquire(False):
                return True
            if end is not None and time.monotonic() >= end:
                return False

    @faults.hands_over
    def release(self) -> None:
        """As the method of `threading.Lock`."""
        if self._num_waiting and self.turns.members.own() is None:
            self._was_released_outside = True
        self._lock.release()
        self.turns.let_others_run()

    def locked(self) -> bool:
        """As the method of `threading.Lock`."""
        return self._lock.locked()

    def _is_free(self) -> bool:
        return not self._lock.locked()

    def _at_fork_reinit(self) -> None:
        self._lock = _thread.allocate_lock()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@faults.hands_over
def slept(turns: Turns, seconds: float) -> None:
    """`time.sleep`: others run meanwhile, and as long as they can."""
    if turns.members.own() is None or not turns.members.others:
        _real_sleep(seconds)
    else:
        turns.wait(lambda: False, max(0.0, seconds))
