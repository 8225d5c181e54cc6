"""What was held over a run, block by block: the one form that reports, `doctor` and `diff` read, whether it was predicted or recorded.

A history is one device's: the bytes after every event, and for every block when it was born and when it died, how large it was, what it was
for and who asked for it. An estimate's tape gives one (`tightfit.diagnosis.history.history_of_tape`), a recording of torch's allocator gives
one too (`history_of_recording`), and nothing that reads it needs to know which.
"""

import dataclasses
import re
from typing import Literal

from tightfit.allocator.settings import AllocatorSettings
from tightfit.tape import Assumption, Category, Column

# What a block is for, by index; the last where a recording does not tell.
CATEGORIES = (*(category.name.lower() for category in Category), "unknown")
UNKNOWN = len(Category)
# A script, a module, or the cell of a notebook; all else is compiled code.
_PYTHON_PLACE = re.compile(r"\.pyw?:\d|^<ipython-input|ipykernel_")
_LIBRARIES = ("site-packages/", "dist-packages/", "/lib/python3", "<frozen ", "<string>", "<eval_with_key>")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HistorySpan:
    """A stretch of events, `begin` included and `end` not; `kind` is `setup`, `step` or `aside`."""

    name: str
    kind: Literal["setup", "step", "aside"]
    begin: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Blocks in the order of their birth, as columns of one length; those that lived before the first event come first, born at -1.

    `died` is the event that freed the block, or the number of events where none did. `num_bytes` is what was asked for and `block_bytes` what
    the allocator gave. `category` indexes `CATEGORIES`, `stack` the stacks and `module` the modules of the history. `address` is -1 where it
    is not known.
    """

    num_bytes: Column
    block_bytes: Column
    address: Column
    lane: Column
    born: Column
    died: Column
    category: Column
    stack: Column
    module: Column

    def __len__(self) -> int:
        return len(self.born)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """One device's memory over a run.

    `allocated` and `reserved` are bytes after each event, of equal length. `time_us` is when each was, empty where that is not known.
    `stacks[i]` lists frames from the innermost out, each as `file.py:41 function`; `user_frame` says which of them is the user's own.
    `context_bytes` and `capacity_bytes` are None where the card is not known. Spans that are guessed have numbers instead of names.
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
    are_spans_guessed: bool = False

    @property
    def num_events(self) -> int:
        """How many events there are."""
        return len(self.allocated)

    @property
    def peak_event(self) -> int:
        """The first event after which most is allocated; -1 where there is no event."""
        return int(self.allocated.argmax()) if len(self.allocated) else -1

    def alive_at(self, event: int) -> Column:
        """Which blocks live just after `event`: booleans, one for each block."""
        return (self.blocks.born <= event) & (self.blocks.died > event)


def user_frame(stack: tuple[str, ...]) -> str:
    """The innermost frame of `stack` that is no library's, or the innermost at all; empty for an empty stack."""
    return next((frame for frame in stack if not is_library_frame(frame)), stack[0] if stack else "")


def is_library_frame(frame: str) -> bool:
    """Whether `frame` lies in an installed package, in Python itself, in compiled code, or in no file."""
    place = frame.replace("\\", "/")
    is_python = _PYTHON_PLACE.search(place) is not None
    return not is_python or any(part in place for part in _LIBRARIES)
