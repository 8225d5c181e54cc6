"""Follows threads that the program starts: the virtual GPU answers in them too, and they take turns (`turns`), so that the tape is the same each time.

Only a program that was seen to use the GPU in a thread of its own is traced so. Threads of the program's own code and of pools are followed; those of
libraries run as ever, and use no GPU. A thread that moves and transforms batches is followed; one that runs a model, where no other uses the GPU meanwhile
(`thread_order`). One that trains is refused.
"""

import _thread
import contextlib
import functools
import inspect
import os
import queue
import selectors
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from torch.utils.data import DataLoader

from tightfit.capture.dispatch.virtual import VirtualGpu
from tightfit.capture.observe import streams
from tightfit.capture.observe.attribution import is_user_file
from tightfit.capture.patches.threads_followed import handed_over
from tightfit.capture.patches.threads_followed.thread_order import Clock, ThreadOrder
from tightfit.capture.patches.threads_followed.turns import Member, TurnLock, Turns, slept
from tightfit.capture.replace import replace
from tightfit.errors import CaptureError, TightfitError, faults
from tightfit.tape import Phase

_POOLS = "concurrent.futures.thread"
_TAKE_TURNS = "threads of the program take turns while it is traced, each until it waits for another one; on a card they run at once"
_SLEEPS = "a thread of the program sleeps until it looks again: it is assumed to run when all others wait, which may be later than on a card"


class ThreadsFollowed:
    """The threads of one trace. `is_over` says whether the steps are, so that what threads still offer is taken by nobody; `stop` ends the trace."""

    def __init__(self, gpu: VirtualGpu, is_over: Callable[[], bool], stop: Callable[[str], None]) -> None:
        self._gpu = gpu
        self._failed: BaseException | None = None
        self._is_over = is_over
        self._stop = stop
        self.turns = Turns(self._switch, self._waited_outside, self._asked, _is_in_backward)
        where = functools.partial(gpu.attribution.where, otherwise="the program")
        self.order = ThreadOrder(gpu.recorder, self.turns.members, where, self._refused)
        self._ended: dict[Member, Clock] = {}
        self._members: weakref.WeakKeyDictionary[threading.Thread, Member] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        """Replaces what Python's threads are made of; a process that has done this is not used for anything else."""
        TurnLock.turns = self.turns
        if sys.platform != "win32":
            # Workers of a data loader, often.
            os.register_at_fork(after_in_child=self.turns.members.forget)
        # Conditions, events, semaphores and barriers take their locks by these names, and so do queues, futures and pools.
        replace(threading, Lock=TurnLock, _allocate_lock=TurnLock, _CRLock=None)
        # Which waits in C, for a lock of its own; pools have their tasks in one.
        replace(queue, SimpleQueue=queue.Queue)
        replace(time, sleep=self._slept)
        handed_over.install(self.order)

        def runs_a_model() -> None:
            self.order.runs_a_model()
            # Nobody works beside it, so that it is what the main thread would be.
            self._gpu.recorder.is_beside, self.turns.main_goes_on = False, True

        self._gpu.fake.runs_a_model = runs_a_model
        start, join, is_alive = threading.Thread.start, threading.Thread.join, threading.Thread.is_alive

        @faults.hands_over
        def started(thread: threading.Thread) -> None:
            if self.turns.members.own() is None:
                start(thread)
                return
            if not is_of_the_program(thread):
                with self.turns.members.aside():
                    start(thread)
                return
            self._gpu.recorder.assume(self._gpu.attribution.where(), _TAKE_TURNS)
            member = self._members[thread] = Member(context=(Phase.OTHER, streams.default_stream(), [], True, True))
            self.order.learn(member, self.order.sent())
            entered = _thread.allocate_lock()
            entered.acquire()
            thread.run = functools.partial(self._run, thread, member, entered)  # type: ignore[method-assign]
            # Until it has entered it takes no turns, and is waited for by nobody else.
            with self.turns.members.aside():
                start(thread)
                entered.acquire()
            self.turns.let_others_run()

        @faults.hands_over
        def joined(thread: threading.Thread, timeout: float | None = None) -> None:
            member = self._members.get(thread)
            if member is not None and self.turns.members.own() is not None and thread is not threading.current_thread():
                while not member.has_ended:
                    self.turns.wait(functools.partial(getattr, member, "has_ended"), timeout)
                    if timeout is not None and not member.has_ended:
                        return
                self._comes_behind(member)
            join(thread, timeout)

        @faults.hands_over
        def asked(thread: threading.Thread) -> bool:
            lives, member = is_alive(thread), self._members.get(thread)
            if not lives and member is not None and self.turns.members.own() is not None:
                self._comes_behind(member)
            return lives

        replace(threading.Thread, start=started, join=joined, is_alive=asked)
        self._look_at_futures()
        self._select_in_turns()
        _load_without_a_pinning_thread()

    def _refused(self, error: CaptureError) -> None:
        """The main thread is told, wherever the error was raised."""
        self._failed, self.turns.must_ask = error, True

    def _comes_behind(self, member: Member) -> None:
        """The thread that calls has waited for the end of `member`."""
        own = self.turns.members.own()
        assert own is not None
        self.order.learn(own, self._ended.get(member, {}))

    def _look_at_futures(self) -> None:
        """What a task of a pool raises goes to a future, which nobody may ask: that the trace cannot follow it is told to the main thread all the same."""
        set_exception = Future.set_exception

        def noted(future: "Future[Any]", error: BaseException | None) -> None:
            if isinstance(error, TightfitError):
                self._failed = error
                self.turns.must_ask = True
            set_exception(future, error)

        replace(Future, set_exception=noted)

    def _select_in_turns(self) -> None:
        """An event loop waits for what its executor's threads do in a call of the system, which passes no turn on."""
        select = selectors.DefaultSelector.select

        @faults.hands_over
        def selected(selector: Any, timeout: float | None = None) -> Any:
            ready = select(selector, 0)
            if ready or self.turns.members.own() is None or not self.turns.members.others:
                return ready or select(selector, timeout)
            self.turns.wait(lambda: bool(select(selector, 0)), timeout)
            return select(selector, 0)

        replace(selectors.DefaultSelector, select=selected)

    def _run(self, thread: threading.Thread, member: Member, entered: _thread.LockType) -> None:
        # An object that refers to itself would live on, and what it holds, until the garbage collector finds it.
        del thread.__dict__["run"]
        self.turns.members.enter(member)
        entered.release()
        self._gpu.fake.threads.add(_thread.get_ident())
        member.begin()
        # As in the main thread (`torch_api`), for `torch.tensor(..., device="cuda")`.
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            with self._gpu:
                thread.run()
        except SystemExit:
            pass
        except BaseException as error:  # noqa: BLE001 - as threading does with whatever a thread raises
            if not isinstance(error, Exception) and self._is_over():
                return
            # Here and not by threading, which would drop the frames, and the tensors in them, in nobody's turn.
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), thread)))
            traceback.clear_frames(error.__traceback__)
            self._failed = self._failed or error
            if isinstance(error, TightfitError):
                self._failed = error
                self.turns.must_ask = True
        finally:
            self._gpu.kernels.thread_ends()
            with contextlib.suppress(CaptureError):
                self._ended[member] = self.order.clock(member)
            self.turns.leave(member)

    @faults.hands_over
    def _slept(self, seconds: float) -> None:
        if self._gpu.recorder.is_in_thread and self.turns.members.own() is not None:
            self._gpu.recorder.assume(self._gpu.attribution.where(), _SLEEPS)
        slept(self.turns, seconds)

    def _waited_outside(self) -> None:
        """How far a thread is ahead that waits for a library's depends on how fast that one is."""
        if self._is_over():
            return
        raise CaptureError(
            f"{self._gpu.attribution.where()} waits in a thread of its own for a thread of a library, and their order is not known; "
            "copy to the GPU in the main thread, at least while it is traced"
        )

    def _asked(self, others_look_again: bool) -> None:
        """The main thread waits in vain: since a thread has failed, or since the loop was left that would have taken what a thread offers."""
        if isinstance(self._failed, TightfitError):
            raise self._failed
        if self._is_over():
            # As the loop in the main thread was left, theirs are.
            if not self.turns.end_others():
                self._stop("its threads wait for one another")
        elif self._failed is not None and not others_look_again:
            # The program would wait for ever.
            raise self._failed

    def _switch(self, before: Member, after: Member) -> None:
        recorder, modules = self._gpu.recorder, self._gpu.attribution.modules
        is_inside = bool(modules) or recorder.phase in (Phase.BACKWARD, Phase.OPTIMIZER)
        with contextlib.suppress(CaptureError):
            self.order.switched(before, after, is_inside=is_inside)
        before.context = (
            recorder.phase,
            streams.current_stream(),
            modules[:],
            recorder.is_in_thread,
            recorder.is_beside,
        )
        recorder.phase, stream, modules[:], recorder.is_in_thread, recorder.is_beside = after.context
        streams.set_stream(stream)


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _load_without_a_pinning_thread() -> None:
    """Has loaders with workers start no thread that pins their batches: it takes no turns, so that what is ahead would depend on how fast it is."""
    begin = DataLoader.__iter__

    def begun(loader: Any) -> Any:
        pins = loader.pin_memory
        loader.pin_memory = pins and not loader.num_workers
        try:
            return begin(loader)
        finally:
            loader.pin_memory = pins

    replace(DataLoader, __iter__=begun)


def is_of_the_program(thread: threading.Thread) -> bool:
    """Whether a thread runs the program's own code, or the tasks of a pool."""
    target: Any = vars(thread).get("_target")
    if type(thread).run is not threading.Thread.run:
        target = type(thread).run
    while isinstance(target, functools.partial):
        target = target.func
    if getattr(target, "__module__", "") == _POOLS:
        return True
    # A model is what the program runs there, wherever its code is: `Thread(target=model.generate)`.
    if isinstance(target, torch.nn.Module) or isinstance(getattr(target, "__self__", None), torch.nn.Module):
        return True
    # A function, a bound method, or an object that is called; a decorator of a library (`torch.no_grad()`) names what it wraps.
    called = target if hasattr(target, "__code__") else vars(type(target)).get("__call__")
    code = getattr(inspect.unwrap(called) if callable(called) else None, "__code__", None)
    return code is not None and is_user_file(code.co_filename)
