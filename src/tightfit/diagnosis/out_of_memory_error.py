"""What torch's text of an out-of-memory error says, as figures: what was asked for, what was free, and who held the rest.

The texts are those of `CUDACachingAllocator.cpp` ("Tried to allocate 1.96 GiB. GPU 0 has a total capacity of ..."), and before torch 2.1 the one in brackets
("(GPU 0; 7.79 GiB total capacity; 5.76 GiB already allocated; ...)"). Figures are rounded to a hundredth there.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

from tightfit.capture.targets.target_files import refuse_no_name
from tightfit.units import format_bytes, parse

SCHEMA = 1
_ASKED = "Tried to allocate"
_SIZE = r"([0-9.]+ ?(?:[KMGT]i?B|bytes))"
_PATTERNS = {
    "requested_bytes": (rf"{_ASKED} {_SIZE}",),
    "capacity_bytes": (rf"total capacity of {_SIZE}", rf"{_SIZE} total capacity"),
    "free_bytes": (rf"of which {_SIZE} is free", rf"{_SIZE} free;"),
    "process_bytes": (rf"this process has {_SIZE} memory in use",),
    "allowed_bytes": (rf"{_SIZE} allowed",),
    "allocated_bytes": (rf"{_SIZE} is allocated by PyTorch", rf"{_SIZE} already allocated"),
    "unused_bytes": (rf"{_SIZE} is reserved by PyTorch but unallocated",),
    "reserved_bytes": (rf"{_SIZE} reserved in total by PyTorch",),
}
_NO_TEXTS = (".py", ".json", ".npz", ".pickle", ".pkl", ".ipynb")
# Logs are long, and a run ends with its error.
_MOST_BYTES_READ = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemoryText:
    """The figures of one error; None where the text does not have one. `unused_bytes` are reserved by torch's allocator and not allocated."""

    requested_bytes: int
    capacity_bytes: int
    free_bytes: int
    allocated_bytes: int
    unused_bytes: int
    process_bytes: int | None = None
    allowed_bytes: int | None = None

    @property
    def missing_bytes(self) -> int:
        """How much more would have had to be free."""
        return self.requested_bytes - self.free_bytes

    @property
    def outside_bytes(self) -> int | None:
        """What the process holds beside torch's allocator: the CUDA context and libraries."""
        return (
            None
            if self.process_bytes is None
            else max(0, self.process_bytes - self.allocated_bytes - self.unused_bytes)
        )

    @property
    def others_bytes(self) -> int | None:
        """What other processes hold."""
        return (
            None if self.process_bytes is None else max(0, self.capacity_bytes - self.free_bytes - self.process_bytes)
        )

    def why(self) -> tuple[str, ...]:
        """What follows from the figures, a sentence each."""
        found = []
        missing = self.missing_bytes
        if missing <= 0:
            limit = f" to {format_bytes(self.allowed_bytes)}" if self.allowed_bytes is not None else ""
            found.append(
                f"so much was free on the GPU: the process is limited{limit} (set_per_process_memory_fraction), or the block is rounded up to more than was left"
            )
        elif self.unused_bytes >= missing:
            found.append(
                f"torch's cache has {format_bytes(self.unused_bytes)} unused, in pieces that are smaller than what was asked for: with "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True it may be enough"
            )
        else:
            found.append(
                f"torch's cache has {format_bytes(self.unused_bytes)} unused, less than is missing: no setting of the allocator is enough"
            )
        if missing > 0 and (self.others_bytes or 0) >= missing:
            found.append(
                f"other processes hold {format_bytes(self.others_bytes or 0)}: without them this would have been there (nvidia-smi names them)"
            )
        found.append(
            "which lines hold what is allocated: tightfit estimate SCRIPT, with the GPU's name; what makes it fit: tightfit plan SCRIPT"
        )
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """All figures, and what follows from them."""
        derived = {name: getattr(self, name) for name in ("missing_bytes", "outside_bytes", "others_bytes")}
        return {"schema": SCHEMA, **dataclasses.asdict(self), **derived, "why": list(self.why())}


def error_in(target: str) -> OutOfMemoryText | None:
    """The last such error in `target`, which is the text itself or a file that has it; None if there is none.

    Raises:
        UsageError: nothing can have that name.
    """
    if _ASKED in target:
        return read_error(target)
    refuse_no_name(target)
    if target.endswith(_NO_TEXTS) or not Path(target).is_file():
        return None
    path = Path(target)
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _MOST_BYTES_READ))
        return read_error(file.read().decode(errors="replace"))


def read_error(text: str) -> OutOfMemoryText | None:
    """The last such error in `text`; None if there is none with all that it needs."""
    _, asked, rest = text.rpartition(_ASKED)
    said = " ".join((asked + rest).split())
    found: dict[str, int] = {}
    for name, patterns in _PATTERNS.items():
        match = next((m for m in (re.search(pattern, said) for pattern in patterns) if m), None)
        if match is not None:
            found[name] = parse(match[1].replace("bytes", "B"))
    reserved = found.pop("reserved_bytes", None)
    if reserved is not None and "allocated_bytes" in found:
        found.setdefault("unused_bytes", max(0, reserved - found["allocated_bytes"]))
    needed = {"requested_bytes", "capacity_bytes", "free_bytes", "allocated_bytes", "unused_bytes"}
    return OutOfMemoryText(**found) if asked and needed <= set(found) else None
