"""Records a run on a card with torch's own memory history, which is a private interface: only this file calls it.

From torch 2.10 on the allocator stamps every event with a text that a program can set: the number of the latest note is set there, so that events and
notes can be matched without synchronising with the card. Before, they are matched by their times (`tightfit.recordings.runs`).
"""

import time
from typing import Any

import torch

from tightfit.runtime.record_hooks import HeldTensors, RunHooks
from tightfit.runtime.recorded import NOTE_PREFIX, CardRun, Note, NoteKind
from tightfit.torch_hooks.manifest import GET_STAMP, SET_STAMP


class CardRecorder:
    """Records the current device. With `stacks`, each allocation has its Python call stack."""

    def __init__(self, *, stacks: bool, max_events: int) -> None:
        self.hooks = RunHooks(self._note)
        self._stacks = stacks
        self._max_events = max_events
        self._notes: list[Note] = []
        self._index = 0
        self._metadata = ""

    def start(self) -> None:
        """Starts recording; a recording by torch that was under way ends here."""
        self._index = torch.cuda.current_device()
        # A program may stamp events itself; its text is put back at the end.
        self._metadata = GET_STAMP.value()() if GET_STAMP.is_expected() else ""
        torch.cuda.memory._record_memory_history(
            "all",
            context="alloc" if self._stacks else None,
            # C++ frames are slow to resolve, and say nothing about the user's lines.
            stacks="python",
            max_entries=self._max_events,
            clear_history=True,
        )
        try:
            self.hooks.install()
        except BaseException:
            self.hooks.remove()
            torch.cuda.memory._record_memory_history(None)
            raise

    def stop(self) -> CardRun:
        """Ends the recording and returns it."""
        self.hooks.remove()
        # Before recording is switched off: `_record_memory_history(None)` drops the events.
        snapshot: Any = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(None)
        self._stamp(self._metadata)
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._index)
        reserved_bytes = torch.cuda.memory_reserved(self._index)
        return CardRun(
            snapshot=dict(snapshot),
            index=self._index,
            device=torch.cuda.get_device_name(self._index),
            capacity_bytes=total_bytes,
            # What the driver counts as used and the allocator has not reserved. On a shared card other
            # processes are in it too.
            context_bytes=max(0, total_bytes - free_bytes - reserved_bytes),
            notes=self._notes,
            has_dropped_events=len(snapshot["device_traces"][self._index]) >= self._max_events,
        )

    def _note(self, kind: NoteKind, text: str, held: HeldTensors) -> None:
        addresses = tuple((category, tuple(map(_address, tensors))) for category, tensors in held.items())
        self._stamp(f"{NOTE_PREFIX}{len(self._notes)}")
        self._notes.append(Note(kind=kind, text=text, time_us=time.time_ns() // 1000, held=addresses))

    @staticmethod
    def _stamp(text: str) -> None:
        if SET_STAMP.is_expected():
            SET_STAMP.value()(text)


def _address(tensor: torch.Tensor) -> int:
    """The address of the storage of `tensor` on the card; 0 if it has none there."""
    if tensor.device.type != "cuda" or tensor.layout != torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()
