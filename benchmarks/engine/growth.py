"""Whether a thousand steps take more than a hundred, on any tier: a convolutional net, everything that is moved, to the host and to disk, on the host.

    python -m benchmarks.engine growth [--steps 1000] [--csv docs/engine/growth.csv]

Counted after a tenth of the steps and at the end: what is handed out of slabs and files, what was taken beside them, the sizes of files, open files, threads, and the
memory of the process. Then the plan is taken off, and nothing of it may be left.
"""

import csv
import dataclasses
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.engine.architectures import ARCHITECTURES
from benchmarks.engine.ways import TIERS, WAYS, freeze
from tightfit.engine.descriptors import close_gone
from tightfit.engine.disk.disk_slab import DiskSlab
from tightfit.engine.host_slab import HostSlab
from tightfit.runtime.apply import apply_choices
from tightfit.units import MIB

_SECONDS_TO_END = 2.0
# Activations, optimizer states and weights: each a thread for copies, and up to 16 for a disk.
_MAX_THREADS = 3 * (1 + 16)
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What is there between two steps: bytes handed out of slabs, taken beside them and in files, and numbers of files and threads."""

    handed_out: int
    beside: int
    in_files: int
    num_files: int
    num_threads: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """One way of moving, after a tenth of its steps and at the end. `grown_mib` is the memory of the process."""

    moved: str
    tier: str
    num_steps: int
    early: Held
    late: Held
    left: Held
    before: Held
    grown_mib: float

    @property
    def is_constant(self) -> bool:
        """Whether nothing grew, and nothing is left over. A pool starts a thread whenever all of its threads are busy, up to its limit: when, is chance."""
        has_threads_within = self.late.num_threads <= _MAX_THREADS
        return self.is_same and has_threads_within and self.left == self.before

    @property
    def is_same(self) -> bool:
        """Whether as much is held at the end as early, but for threads."""
        return self.early == dataclasses.replace(self.late, num_threads=self.early.num_threads)


def held_now() -> Held:
    """What the engine holds in this process."""
    slabs = [each for each in gc.get_objects() if type(each) in (HostSlab, DiskSlab)]
    return Held(
        handed_out=sum(slab.num_bytes - slab.free_bytes for slab in slabs),
        beside=sum(slab.overflow_bytes for slab in slabs if isinstance(slab, HostSlab)),
        in_files=sum(slab.num_bytes for slab in slabs if isinstance(slab, DiskSlab)),
        num_files=len(os.listdir("/proc/self/fd")),
        num_threads=len(_threads()),
    )


def grown(way: str, tier: str, num_steps: int, name: str = "resnet") -> Growth:
    """Trains one model for so many steps with one way of moving on it."""
    forget()
    before = held_now()
    torch.manual_seed(0)
    model, loss_of = ARCHITECTURES[name]()
    if way == "frozen weights":
        freeze(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    session = apply_choices(WAYS[way](model, tier), model, [optimizer])
    early, early_mib = held_now(), 0.0
    for step in range(num_steps):
        loss_of(step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == num_steps // 10:
            gc.collect()
            early, early_mib = held_now(), _process_mib()
    gc.collect()
    late, late_mib = held_now(), _process_mib()
    session.undo()
    del model, loss_of, optimizer, session
    forget()
    return Growth(
        moved=way,
        tier=tier,
        num_steps=num_steps,
        early=early,
        late=late,
        left=held_now(),
        before=before,
        grown_mib=round(late_mib - early_mib, 2),
    )


def forget() -> None:
    """Collects what is not needed, closes its files, and waits for its threads to end; twice, as a thread may hold what it has done last."""
    for _ in range(2):
        gc.collect()
        close_gone()
        for thread in _threads():
            thread.join(_SECONDS_TO_END)


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("tightfit-")]


def _process_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE / MIB


def growths(num_steps: int) -> Iterator[Growth]:
    """All ways and tiers."""
    for way in WAYS:
        for tier in TIERS:
            yield grown(way, tier, num_steps)


def growth(num_steps: int, path: Path | None) -> int:
    """Prints a row for each, and writes them to `path`; how many grew."""
    torch.set_num_threads(1)
    # What is loaded and made once.
    grown("all", "disk", 10)
    found = []
    for each in growths(num_steps):
        found.append(each)
        verdict = "constant" if each.is_constant else f"GROWN {each}"
        print(
            f"{each.moved:15} {each.tier:5} {num_steps} steps  {verdict}  process {each.grown_mib:+.2f} MiB", flush=True
        )
    if path is not None:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            names = [field.name for field in dataclasses.fields(Held)]
            writer.writerow(["moved", "tier", "num_steps", *names, "constant", "nothing_left", "grown_mib"])
            for g in found:
                counts = dataclasses.astuple(g.late)
                nothing_left = g.left == g.before
                writer.writerow([g.moved, g.tier, g.num_steps, *counts, g.is_constant, nothing_left, g.grown_mib])
    return sum(not each.is_constant for each in found)
