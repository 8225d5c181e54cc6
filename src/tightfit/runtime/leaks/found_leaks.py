"""The result of `tightfit.leaks`, as plain data and as text: each leak with its allocation site, its holder, its cause and what to do."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from tightfit.units import format_bytes

SCHEMA = 1
Cause = Literal[
    "reference cycle",
    "Python container",
    "retained autograd graph",
    "allocator fragmentation",
    "memory outside torch",
    "unknown",
]
CYCLE: Cause = "reference cycle"
CONTAINER: Cause = "Python container"
GRAPH: Cause = "retained autograd graph"
FRAGMENTATION: Cause = "allocator fragmentation"
OUTSIDE: Cause = "memory outside torch"
UNKNOWN: Cause = "unknown"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeakHolder:
    """What keeps the memory. `path` is a path of names (`train.history[-1]['loss']`), empty where no Python object keeps it.

    `root` says what the path begins with ("local variable of train()"), `what` the object that grows, `fix` what to do.
    """

    cause: Cause
    path: str
    root: str
    what: str
    fix: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeakSite:
    """An allocation site: `where` is the user's innermost line (`train.py:41`), `function` the one around it, `callers` the user's lines further out."""

    where: str
    function: str
    callers: tuple[str, ...]
    bytes_per_step: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """Memory that grows from step to step: `bytes_per_step`, of which `sites` are the allocation sites, largest first (empty outside of torch)."""

    holder: LeakHolder
    sites: tuple[LeakSite, ...]
    bytes_per_step: int

    @property
    def cause(self) -> Cause:
        """One of the classes of causes."""
        return self.holder.cause

    @property
    def where(self) -> str:
        """The line of the largest allocation site, empty where there is none."""
        return self.sites[0].where if self.sites else ""

    def explain(self, shown: Callable[[str], str] = str) -> str:
        """Some lines of text; `shown` shortens the places."""
        at = f", allocated at {shown(self.where)}" if self.where else ""
        lines = [f"{self.cause}: {format_bytes(self.bytes_per_step)} more per step{at}"]
        lines += [f"  called from {shown(caller)}" for site in self.sites[:1] for caller in site.callers[:3]]
        lines += [
            f"  also {shown(site.where)}: {format_bytes(site.bytes_per_step)} per step" for site in self.sites[1:4]
        ]
        if self.holder.path:
            lines.append(f"  held by {self.holder.path} ({self.holder.root})")
        if self.holder.what:
            lines.append(f"  {self.holder.what}")
        return "\n".join([*lines, f"  fix: {self.holder.fix}"])

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"cause": self.cause, "where": self.where, **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeakReport:
    """What a block of `num_steps` steps leaks, fastest first. `note` says why nothing could be told, empty where something could."""

    leaks: tuple[Leak, ...]
    num_steps: int
    note: str

    def explain(self) -> str:
        """The report as text."""
        if self.note:
            return f"leaks: {self.note}"
        if not self.leaks:
            return f"leaks: none in {self.num_steps} steps"
        return "\n".join(
            (f"leaks: {len(self.leaks)} in {self.num_steps} steps", *(leak.explain() for leak in self.leaks))
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        leaks = [leak.to_json() for leak in self.leaks]
        return {"schema": SCHEMA, "num_steps": self.num_steps, "note": self.note, "leaks": leaks}


def family_of(path: str) -> str:
    """What is before the last index of a path: two lists of one object are told apart, two elements of one list are not."""
    return path.rpartition("[")[0] or path


BOUNDED = "bounded: "
"""What `LeakHolder.what` begins with for a container that has a bound, and so does not leak."""


def is_bounded(holder: LeakHolder) -> bool:
    """Whether what is held cannot grow without end."""
    return holder.what.startswith(BOUNDED)


def fragmentation(sites: tuple[LeakSite, ...], bytes_per_step: int) -> Leak:
    """Reserved memory that grows by `bytes_per_step` because of requests at `sites`, which no free block is large enough for."""
    holder = LeakHolder(
        cause=FRAGMENTATION,
        path="",
        root="",
        what="reserved memory grows and allocated memory does not: no free block fits the next request",
        fix="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; equal sizes (padding to a few lengths), or the largest batch first",
    )
    return Leak(holder=holder, sites=sites, bytes_per_step=bytes_per_step)
