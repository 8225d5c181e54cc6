"""Backward passes in a thread of their own, as those of a card are: what holds at the host alone is found without one.

Of a graph on a card, torch's engine calls each function, hook and Python callback in a thread per card that lives as long as the process, while the caller waits; of one at the
host, in the caller's thread. Here one thread runs every pass. It takes over what torch's engine hands over (`at::ThreadLocalState`: autocast, modes, hooks for saved
tensors, inference mode) and, like it, nothing of Python's own: `threading.local`, context variables, the caller's stack.
"""

import _thread
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.variable import Variable

from tightfit.effects.values.saved_hooks import top_saved_hooks


class BackwardThread:
    """Takes the place of torch's engine; a pass that begins inside of another one runs in that one's thread, as torch's do."""

    def __init__(self) -> None:
        self._engine = Variable._execution_engine
        # Locks, of which nobody is told: what a program gives to other threads by queues and events is followed.
        self._call: Callable[[], None] | None = None
        self._has_call, self._is_free = _locked(), _thread.allocate_lock()
        self._thread = threading.Thread(target=self._work, name="backward", daemon=True)
        self.num_passes = 0

    @contextlib.contextmanager
    def in_use(self) -> Iterator["BackwardThread"]:
        """Has all passes of the process run here."""
        if not self._thread.is_alive():
            self._thread.start()
        Variable._execution_engine = self  # type: ignore[assignment]
        try:
            yield self
        finally:
            Variable._execution_engine = self._engine

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """As torch's engine has it."""
        if threading.current_thread() is self._thread:
            return self._engine.run_backward(*args, **kwargs)
        self.num_passes += 1
        state, has_ended = _ThreadState(), _locked()
        found: list[Any] = [None]

        def call() -> None:
            try:
                with state.taken_over():
                    found[0] = self._engine.run_backward(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                found[0] = error
            has_ended.release()

        with self._is_free:
            self._call = call
            self._has_call.release()
            has_ended.acquire()
        (result,) = found
        if isinstance(result, BaseException):
            try:
                raise result
            finally:
                # The frame would refer to the error, and the error to the frame.
                found.clear()
                del result
        return result

    def queue_callback(self, callback: Callable[[], None]) -> None:
        """As torch's engine has it."""
        self._engine.queue_callback(callback)

    def is_checkpoint_valid(self) -> bool:
        """As torch's engine has it."""
        return self._engine.is_checkpoint_valid()

    def _work(self) -> None:
        while True:
            self._has_call.acquire()
            # What a pass was given must not live until the next one.
            call, self._call = self._call, None
            assert call is not None
            call()
            del call


def _locked() -> _thread.LockType:
    lock = _thread.allocate_lock()
    lock.acquire()
    return lock


class _ThreadState:
    """What torch's engine hands over to its threads, as it is where this is made."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
        ]
        self._caches = torch.is_autocast_cache_enabled()
        self._functions = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
        self._dispatchers = [torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())]
        self._saving = top_saved_hooks()

    @contextlib.contextmanager
    def taken_over(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self._grad))
            stack.enter_context(torch.inference_mode(self._inference))
            for device, is_on, dtype in self._autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=is_on, cache_enabled=self._caches))
            for mode in self._functions:
                torch._C._push_on_torch_function_stack(mode)
                stack.callback(torch._C._pop_torch_function_stack)
            for mode in self._dispatchers:
                torch._C._push_on_torch_dispatch_stack(mode)
                stack.callback(torch._C._pop_torch_dispatch_stack, getattr(mode, "_mode_key", None))
            if self._saving is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._saving))
            yield
