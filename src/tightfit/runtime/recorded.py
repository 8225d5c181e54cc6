"""The result of a recorder as plain data: torch's own memory snapshot of a card, or allocations and frees of host tensors.

Both have notes on what the program was doing: the module that ran, the phase that began, the end of a step, and the addresses (on the host: the
storages) of parameters, gradients and optimizer states at that time.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

NoteKind = Literal["module", "phase", "step", "held"]
Held = tuple[tuple[str, tuple[int, ...]], ...]
"""Categories, each with the addresses of its storages on a card, or with the numbers of its storages on the host."""

# Texts of notes of the kind `phase`, and of the kind `step`: after `BY_OPTIMIZER` comes the number of the optimizer that stepped.
FORWARD, BACKWARD, OPTIMIZER, ASIDE, OTHER = "forward", "backward", "optimizer", "aside", "other"
BY_OPTIMIZER, BY_USER = "optimizer", "user"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """One note. `text` is a module path, a phase, or what ended the step; `time_us` is Unix time in microseconds."""

    kind: NoteKind
    text: str
    time_us: int
    held: Held


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CardRun:
    """A run on a card. `snapshot` is what `torch.cuda.memory._snapshot` gave; note `i` was announced to it as `NOTE_PREFIX` and `i`."""

    snapshot: dict[str, Any]
    index: int
    device: str
    capacity_bytes: int
    context_bytes: int
    notes: Sequence[Note]
    has_dropped_events: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostEvent:
    """A storage was allocated (`num_bytes` is 0 or more, `stack` an index of `stacks`) or freed (`num_bytes` is -1)."""

    storage: int
    num_bytes: int
    stack: int
    time_us: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostRun:
    """A run on the host: events and notes in the order in which they came; the first `num_at_start` events were before the recording."""

    events: Sequence[HostEvent | Note]
    num_at_start: int
    stacks: Sequence[Sequence[Mapping[str, Any]]]


NOTE_PREFIX = "tightfit "
_OWN_FOLDER = str(Path(__file__).parents[1]) + os.sep


def is_own_frame(file: str) -> bool:
    """Whether a frame of `file` belongs to this package, which appears in call stacks because it runs the script and has hooks in it."""
    return file.startswith(_OWN_FOLDER)
