"""Threads that take turns do the same each time, and wait for one another as without turns."""

import _thread
import threading
import time
from collections import deque

import pytest

from tightfit.capture.patches.threads_followed.turns import Member, ThreadEnded, TurnLock, Turns


class Queue:
    """A queue of at most `size`, of conditions over locks that take turns."""

    def __init__(self, size: int) -> None:
        self.size, self.items = size, deque[object]()
        # A condition makes its own locks by a name of its module, which a traced process replaces; here they are made by hand.
        self.lock = TurnLock()

    def put(self, item: object) -> None:
        while True:
            with self.lock:
                if len(self.items) < self.size:
                    self.items.append(item)
                    return
            TurnLock.turns.wait(lambda: len(self.items) < self.size)

    def get(self) -> object:
        while True:
            with self.lock:
                if self.items:
                    return self.items.popleft()
            TurnLock.turns.wait(lambda: bool(self.items))


class Program:
    """Threads that take turns, and what they do in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.did: list[str] = []
        self.asked: list[bool] = []
        self.outside: list[bool] = []
        self.is_in_backward = False
        self.turns = Turns(
            lambda before, after: None,
            lambda: self.outside.append(True),
            self.asked.append,
            lambda: self.is_in_backward,
        )
        monkeypatch.setattr(TurnLock, "turns", self.turns, raising=False)

    def start(self, run) -> Member:
        member, entered = Member(), threading.Event()

        def turn() -> None:
            self.turns.members.enter(member)
            entered.set()
            member.begin()
            try:
                run()
            except ThreadEnded:
                self.did.append("ended")
            finally:
                self.turns.leave(member)

        threading.Thread(target=turn, daemon=True).start()
        entered.wait()
        self.turns.let_others_run()
        return member


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    return Program(monkeypatch)


def test_a_thread_is_as_far_ahead_as_its_queue_lets_it(program: Program) -> None:
    queue = Queue(2)

    def load() -> None:
        for number in range(6):
            program.did.append(f"load {number}")
            queue.put(number)

    loader = program.start(load)
    for _ in range(6):
        number = queue.get()
        program.did.append(f"use {number}")
    program.turns.wait(lambda: loader.has_ended)
    loads, uses = ([f"{what} {n}" for n in range(6)] for what in ("load", "use"))
    # Two are queued and the third is in hand; each that is taken makes room for the one in hand, and the next is loaded before it is used.
    expected = loads[:3]
    for number in range(6):
        expected += [*loads[number + 3 : number + 4], uses[number]]
    assert program.did == expected


def test_threads_run_in_the_order_in_which_they_were_started(program: Program) -> None:
    gate = [False]

    def run(name: str):
        def of() -> None:
            program.turns.wait(lambda: gate[0])
            program.did.append(name)

        return of

    members = [program.start(run(name)) for name in "abc"]
    gate[0] = True
    program.turns.wait(lambda: all(member.has_ended for member in members))
    assert program.did == ["a", "b", "c"]


def test_a_lock_is_waited_for_while_its_holder_waits(program: Program) -> None:
    lock, gate = TurnLock(), [False]

    def hold() -> None:
        with lock:
            program.turns.wait(lambda: gate[0])
            program.did.append("held")

    program.start(hold)
    assert not lock.acquire(blocking=False)
    assert not lock.acquire(timeout=0.01)
    gate[0] = True
    with lock:
        program.did.append("taken")
    assert program.did == ["held", "taken"] and not lock.locked()


def test_other_threads_wait_as_ever_and_that_they_were_waited_for_is_told(program: Program) -> None:
    lock = TurnLock()
    lock.acquire()

    def wait() -> None:
        lock.acquire()
        program.did.append("taken")

    waiter = program.start(wait)
    threading.Thread(target=lambda: (time.sleep(0.01), lock.release())).start()
    program.turns.wait(lambda: waiter.has_ended)
    assert program.did == ["taken"] and program.outside == [True]


def test_threads_that_wait_in_vain_are_ended_where_they_wait(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightfit.capture.patches.threads_followed.turns._SECONDS_IN_VAIN", 0.01)
    waiter = program.start(lambda: program.turns.wait(lambda: False))
    # The main thread waits for it, and is asked what to do.
    program.turns.wait(lambda: waiter.has_ended)
    assert program.asked == [False] and not waiter.has_ended
    assert program.turns.end_others()
    program.turns.wait(lambda: waiter.has_ended)
    assert program.did == ["ended"] and waiter.has_ended
    assert not program.turns.end_others()


def test_a_hook_in_a_thread_of_autograd_waits_in_the_turn_of_the_main_thread(program: Program) -> None:
    jobs, answers = Queue(1), Queue(1)

    def work() -> None:
        while (job := jobs.get()) is not None:
            program.did.append(f"work {job}")
            answers.put(job)

    worker = program.start(work)
    ended = _thread.allocate_lock()
    ended.acquire()

    def hook() -> None:
        try:
            for number in range(3):
                jobs.put(number)
                program.did.append(f"hook {answers.get()}")
        finally:
            ended.release()

    program.is_in_backward = True
    # As autograd's threads are: Python has not started it. The main thread waits for its end in C.
    _thread.start_new_thread(hook, ())
    assert ended.acquire(timeout=20)
    program.is_in_backward = False
    assert program.did == [f"{who} {n}" for n in range(3) for who in ("work", "hook")]
    jobs.put(None)
    program.turns.wait(lambda: worker.has_ended)
    assert not program.outside
