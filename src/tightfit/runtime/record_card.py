"""Records on a card with torch's own recorder of its allocator, which is private: this file alone calls it.

The allocator stamps every event with a text that a program may set, so the number of the latest note is set there; which event belongs to
which note is then known without asking the card for anything.
"""

import time
from typing import Any

import torch

from tightfit.runtime.record_hooks import HeldTensors, RunHooks
from tightfit.runtime.recorded import NOTE_PREFIX, CardRun, Note, NoteKind

PRIVATE_NAMES = ("_record_memory_history", "_snapshot", "_set_memory_metadata", "_get_memory_metadata")
"""What is used of `torch.cuda.memory` that torch does not promise to keep (torch 2.11 to 2.13 have it)."""


class CardRecorder:
    """Records the current device. With `stacks`, each allocation has the Python stack that asked for it."""

    def __init__(self, *, stacks: bool, max_events: int) -> None:
        self.hooks = RunHooks(self._note)
        self._stacks = stacks
        self._max_events = max_events
        self._notes: list[Note] = []
        self._index = 0
        self._metadata = ""

    def start(self) -> None:
        """Begins to record; a recording of torch's that was under way ends here."""
        self._index = torch.cuda.current_device()
        self._metadata = torch.cuda.memory._get_memory_metadata()
        torch.cuda.memory._record_memory_history(
            "all",
            context="alloc" if self._stacks else None,
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
        snapshot: Any = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(None)
        torch.cuda.memory._set_memory_metadata(self._metadata)
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._index)
        reserved_bytes = torch.cuda.memory_reserved(self._index)
        return CardRun(
            snapshot=dict(snapshot),
            index=self._index,
            device=torch.cuda.get_device_name(self._index),
            capacity_bytes=total_bytes,
            context_bytes=max(0, total_bytes - free_bytes - reserved_bytes),
            notes=self._notes,
            has_dropped_events=len(snapshot["device_traces"][self._index]) >= self._max_events,
        )

    def _note(self, kind: NoteKind, text: str, held: HeldTensors) -> None:
        addresses = tuple((category, tuple(map(_address, tensors))) for category, tensors in held.items())
        torch.cuda.memory._set_memory_metadata(f"{NOTE_PREFIX}{len(self._notes)}")
        self._notes.append(Note(kind=kind, text=text, time_us=time.time_ns() // 1000, held=addresses))


def _address(tensor: torch.Tensor) -> int:
    """Where the storage of `tensor` begins on the card; 0 for what has no storage there."""
    if tensor.device.type != "cuda" or tensor.layout != torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()
