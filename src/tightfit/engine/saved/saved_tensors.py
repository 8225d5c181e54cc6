"""Moves what blocks save for backward to the host while the following block runs, and back one block ahead of the backward pass.

The borders of the blocks' calls are the clock. At the end of a call the storages that it was asked for begin to leave, where nothing else refers to
them, and the others of them (its input) when the next call begins; at the end of that one the computation's stream waits for those copies, and their
memory on the card is free again. In the backward pass the first tensor that is needed of a call brings back what is missing of it, and begins to bring
back the call before it. All of this happens at fixed places of the program, so the memory that is held does not depend on how fast the copies are.
"""

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from tightfit.effects.ambient import dispatch_modes_of_program, modes_of_program
from tightfit.effects.bytecode.asked_of_saved import question_of
from tightfit.effects.values.card_sums import unseen
from tightfit.engine.descriptors import close_gone
from tightfit.engine.disk.disk_copies import DiskSpace
from tightfit.engine.host_slab import unregister_gone
from tightfit.engine.saved.block_call import BlockCall, Selection
from tightfit.engine.saved.known_storages import KnownStorages
from tightfit.engine.saved.saved_storage import Place, Saved
from tightfit.engine.saved.storage_moves import Check, StorageMoves
from tightfit.torch_hooks.saving_functions import on_saving_functions, saving_function

_BORDERS_TO_TRY = 2
"""At the ends of how many calls a storage is looked at: its block's input and result are let go a little later than the rest."""


class Held:
    """A result that is held for a call, to be taken back."""

    def __init__(self, saved: Saved, unpack: Callable[[Saved], torch.Tensor]) -> None:
        self._saved = saved
        self._unpack = unpack

    @property
    def is_written_to(self) -> bool:
        """Whether somebody has written to it since."""
        return self._saved.is_written_to

    def take(self) -> torch.Tensor:
        """The result, on the card."""
        return self._unpack(self._saved)


class SavedTensors:
    """The storages that blocks of one model have saved on `device`; `statistics` counts what is moved.

    They go to the host, or to `disk` in calls that say so. `when_left` and `when_back` are called with each storage and its bytes on the card,
    `refuse` with the label of a call and why it cannot be finished, for the error to raise.
    """

    def __init__(
        self,
        device: torch.device,
        host_bytes: int,
        *,
        statistics: Counter[str],
        disk: DiskSpace | None = None,
        when_left: Check = lambda _storage, _bytes: None,
        when_back: Check = lambda _storage, _bytes: None,
        refuse: Callable[[str, str], Exception] = lambda _label, message: RuntimeError(message),
    ) -> None:
        self.moves = StorageMoves(device, host_bytes, statistics=statistics, when_left=when_left, when_back=when_back)
        if disk is not None:
            self.moves.add_disk(disk)
        self._statistics = statistics
        self._refuse = refuse
        self._calls: dict[int, BlockCall] = {}
        self._num_calls = self._num_looked_at = 0
        # The calls that are running, the outermost first, and the number of the last one that is over.
        self._running: list[BlockCall] = []
        self._last_over = 0
        # The backward pass runs in threads of autograd's own.
        self._lock = threading.RLock()
        self._known = KnownStorages(device, self._lock)
        self.is_on = True
        on_saving_functions(self)
        self.question = ""
        """Where the backward pass of a function asks what a saved tensor is, besides its values (`effects.asked_of_saved`)."""

    @contextmanager
    def call(self, selection: Selection | None, *, label: str = "") -> Iterator[None]:
        """Runs a call of a block; what the `selection` names of all that is saved for backward inside goes to the host afterwards."""
        with self._lock:
            self._num_calls += 1
            call = BlockCall(
                self._num_calls, selection, previous=self._last_over, depth=len(self._running), label=label
            )
            self._calls[call.number] = call
            self._running.append(call)
            # The caller has let go of what it gave to the call before.
            self._begin_to_leave(is_end=False)
        hooks = functools.partial(self._pack, call), functools.partial(_unpack, self._refuse, self._unpack, call)
        try:
            with torch.autograd.graph.saved_tensors_hooks(*hooks):
                yield
        finally:
            with self._lock:
                self._running.remove(call)
                self._last_over = max(self._last_over, call.number)
        with self._lock:
            self._border(call)

    def hold(self, tensor: torch.Tensor) -> "Held | None":
        """Takes a result that an operator of the running call has made and the call keeps by itself, as if autograd had saved it; None if no call runs."""
        if not self._running:
            return None
        call = self._running[-1]
        return Held(self._pack(call, tensor, is_made=True), functools.partial(self._unpack, call))

    def is_only_border(self, hooks: tuple[Any, Any]) -> bool:
        """Whether these are the hooks of a call of ours that moves nothing, so that one inside of it can have its own."""
        pack = hooks[0]
        return isinstance(pack, functools.partial) and pack.func == self._pack and pack.args[0].selection is None

    def end(self) -> None:
        """Moves nothing more to the host. What is there comes back when it is needed."""
        with self._lock:
            self.is_on = False
            self.moves.let_go()
        unregister_gone()
        close_gone()

    def _pack(self, call: BlockCall, tensor: torch.Tensor, *, is_made: bool = False) -> Saved:
        self.question = self.question or question_of(saving_function())
        storage = self._known.saved_of(call, tensor, is_made=is_made) if self.is_on else None
        saved = Saved(tensor, storage)
        if storage is not None:
            storage.saved.append(weakref.ref(saved))
        return saved

    def _unpack(self, call: BlockCall, saved: Saved) -> torch.Tensor:
        saved.check()
        if not call.is_reached:
            with self._lock:
                self._reach(call)
        if saved.tensor is not None:
            return saved.tensor
        storage = saved.storage
        assert storage is not None
        with self._lock:
            self.moves.have(storage)
            assert storage.on_card is not None
            return saved.of(storage.on_card)

    def _border(self, ended: BlockCall) -> None:
        """The end of a call: what left before is dropped from the card, what it saved begins to leave."""
        self.moves.let_go(ended)
        self._known.forget_gone()
        # As often as what is known of storages is looked at: a recurrent model has thousands of calls in one graph.
        if len(self._calls) >= 2 * self._num_looked_at:
            for number in [n for n, call in self._calls.items() if call.num_borders > _BORDERS_TO_TRY and call.is_over]:
                del self._calls[number]
            self._num_looked_at = len(self._calls)
        if not ended.select():
            self._statistics["calls unlike the plan"] += 1
        self._begin_to_leave(is_end=True)

    def _begin_to_leave(self, *, is_end: bool) -> None:
        """Copies what is to leave of the last calls, where nothing else refers to it any more."""
        for call in reversed(self._calls.values()):
            # Of a call that runs nothing has been settled.
            if call in self._running:
                continue
            call.num_borders += is_end
            # When a call begins only the one before it is looked at.
            if call.num_borders > _BORDERS_TO_TRY - (not is_end):
                self._close(call)
                break
            for storage in call.storages(Place.CARD):
                is_wanted = self.is_on and not call.is_reached and call.may_leave(storage.num_bytes)
                if is_wanted and storage.is_ours_alone():
                    self.moves.leave(storage)
                    call.left(storage.num_bytes)

    def _close(self, call: BlockCall) -> None:
        stayed = call.close()
        if stayed:
            self._statistics["storages that stayed"] += stayed

    def _reach(self, call: BlockCall) -> None:
        """The backward pass has come to `call`: brings back what is missing of it, and begins to with the call before it."""
        call.is_reached = True
        self._close(call)
        # What was about to leave is needed soon.
        self.moves.stay()
        for number in (call.number, call.previous):
            if number in self._calls:
                for storage in self._calls[number].storages(Place.HOST):
                    self.moves.fetch(storage)


def _unpack(
    refuse: Callable[[str, str], Exception],
    unpack: Callable[[BlockCall, Saved], torch.Tensor],
    call: BlockCall,
    saved: Saved,
) -> torch.Tensor:
    """The hook for a tensor that the backward pass needs, of which modes of the program's around that pass see nothing."""
    # What torch itself does to a tensor that a hook returns it shows to dispatch modes.
    if modes := dispatch_modes_of_program():
        raise refuse(
            call.label, f"the backward pass runs under {type(modes[0]).__name__}, a mode that sees every operator"
        )
    with unseen() if modes_of_program() else nullcontext():
        return unpack(call, saved)
