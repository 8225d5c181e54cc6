"""The memory history of a run, block by block: the form that reports, `doctor` and `diff` read, whether it was predicted or recorded.

A history covers one device: the bytes after every event, and for every block when it was allocated and freed, its size, its category and its
allocation site. It is built from a tape (`tightfit.diagnosis.histories.history_of_tape`) or from a recording of torch's allocator
(`history_of_recording`), and its readers need not know which.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Literal

from tightfit.allocator.settings import AllocatorSettings
from tightfit.simulate.step_tracks import StepTracks
from tightfit.tape import Assumption, Category, Column

# The categories of blocks by index; the last one is for recordings, which do not always tell.
CATEGORIES = (*(category.name.lower() for category in Category), "unknown")
UNKNOWN = len(Category)
# A frame of a script, a module, or a notebook cell (ipykernel writes cells to ipykernel_N/*.py); any other is compiled code.
_PYTHON_PLACE = re.compile(r"\.pyw?:\d|^<ipython-input|ipykernel_")
_LIBRARIES = ("site-packages/", "dist-packages/", "/lib/python3", "<frozen ", "<string>", "<eval_with_key>")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HistorySpan:
    """A range of events `[begin, end)`; `kind` is `setup`, `step` or `aside` (outside of steps)."""

    name: str
    kind: Literal["setup", "step", "aside"]
    begin: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Blocks in the order of allocation, as columns of equal length; those allocated before the first event come first, with `allocated_at` -1.

    `freed_at` is the event that freed the block, or the number of events where none did. `num_bytes` is the requested size and `block_bytes` the
    rounded one. `lane` is the stream. `category` indexes `CATEGORIES`, `stack` the stacks and `module` the modules of the history. `address` is
    -1 where it is not known.
    """

    num_bytes: Column
    block_bytes: Column
    address: Column
    lane: Column
    allocated_at: Column
    freed_at: Column
    category: Column
    stack: Column
    module: Column

    def __len__(self) -> int:
        return len(self.allocated_at)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """One device's memory over a run.

    `allocated` and `reserved` are bytes after each event, of equal length. `time_us` is the time of each event, empty where it is not known.
    `stacks[i]` lists frames from the innermost out, each as `file.py:41 function`; `user_frame` picks the user's own one.
    `context_bytes` and `capacity_bytes` are None where the GPU is not known. Of what lies outside of torch's allocator `communicator_bytes` are those of NCCL, the rest is the context; both are in `context_bytes`. Spans that are guessed have numbers instead of names.
    `module_classes` has the classes of modules by their paths, as far as they are known. `step_tracks` are of the last step, where it was predicted.
    """

    label: str
    origin: Literal["recording", "estimate"]
    device: str
    capacity_bytes: int | None
    context_bytes: int | None
    settings: AllocatorSettings
    allocated: Column
    reserved: Column
    time_us: Column
    blocks: Blocks
    stacks: tuple[tuple[str, ...], ...]
    modules: tuple[str, ...]
    spans: tuple[HistorySpan, ...]
    assumptions: tuple[Assumption, ...]
    module_classes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    are_spans_guessed: bool = False
    step_tracks: StepTracks | None = None
    communicator_bytes: int = 0

    @property
    def num_events(self) -> int:
        """The number of events."""
        return len(self.allocated)

    @property
    def peak_event(self) -> int:
        """The event of the allocated peak, the first of several; -1 where there is no event."""
        return int(self.allocated.argmax()) if len(self.allocated) else -1

    def alive_at(self, event: int) -> Column:
        """Which blocks are allocated just after `event`: booleans, one for each block."""
        return (self.blocks.allocated_at <= event) & (self.blocks.freed_at > event)


def user_frame(stack: tuple[str, ...]) -> str:
    """The innermost frame of `stack` outside of libraries, or else the innermost one; empty for an empty stack."""
    # A stack without any frame of the user's (a callback of the autograd engine) is named by its innermost frame.
    return next((frame for frame in stack if not is_library_frame(frame)), stack[0] if stack else "")


def is_library_frame(frame: str) -> bool:
    """Whether `frame` lies in an installed package, in Python itself, in compiled code, or in no file."""
    place = frame.replace("\\", "/")
    is_python = _PYTHON_PLACE.search(place) is not None
    return not is_python or any(part in place for part in _LIBRARIES)
