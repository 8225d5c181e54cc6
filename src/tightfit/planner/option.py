"""Options: one concrete choice of a technique each, as numbers. They are all that a planner sees of a technique.

The effect of an option on memory is a list of changes, each a range of the tape's events with the bytes that are added or removed there. A change
knows no budget and no peak; which time steps matter follows from all options together (`tightfit.planner.problem`).
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tightfit.planner.sides import Sides


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """`num_bytes` more (or, negative, fewer) are allocated after each of the events `[begin, end)`."""

    begin: int
    end: int
    num_bytes: int


def merged(changes: Iterable[Change]) -> tuple[Change, ...]:
    """The sum of the changes as disjoint ranges, in order."""
    rows = np.array([(change.begin, change.end, change.num_bytes) for change in changes], dtype=np.int64).reshape(-1, 3)
    begins, ends, num_bytes = rows.T
    borders, place = np.unique(np.append(begins, ends), return_inverse=True)
    steps = np.zeros(len(borders), dtype=np.int64)
    np.add.at(steps, place, np.append(num_bytes, -num_bytes))
    levels = np.cumsum(steps)[:-1]
    # Ranges in which the changes cancel are left out.
    kept = np.flatnonzero(levels)
    found = zip(borders[kept].tolist(), borders[kept + 1].tolist(), levels[kept].tolist(), strict=True)
    return tuple(Change(begin=begin, end=end, num_bytes=level) for begin, end, level in found)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RetainedPass:
    """A backward pass, the events `[begin, end)`, that would retain its graph. At the events `freed_at`, in order, activations are freed in the plain
    run, `freed_bytes` in sum until then."""

    begin: int
    end: int
    freed_at: tuple[int, ...]
    freed_bytes: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One choice of a technique at one place.

    `where` is the place: a path of the module tree that begins with the class of the model ("GPT2LMHeadModel.transformer.h.3"), or a word for
    places without a module ("optimizer", "allocator"). `equivalence_class` is equal for places whose options differ only in their position.
    `settings` is what `AbstractTechnique.apply` needs, as JSON. `seconds` are added to each step (negative: saved) by this option alone; several together add
    what their `sides` come to, as what one of them hides behind the slower side, all of them may not. None: `seconds` on either side.

    At most one of the options that share a member of `slots` is chosen: a checkpointed module, say, takes the slots of all of its submodules.
    `needs_new_trace`: it changes the run so much that it needs a new trace, on which the other options are computed again; until then, where it saves,
    the others are assumed to keep `leaves_share` of their savings (residual savings). `alloc_conf` are allocator settings, `empties_at` events
    before which the cache is emptied: both are evaluated by replaying a traced run with them.

    `retains` are backward passes that are run twice with it, the first time with the graph retained, which is among its changes as long as no other
    option drops what the graph holds; `in_backward` is the part of `sides` that each run of a backward pass takes (`tightfit.planner.retained`).
    """

    technique: str
    where: str
    equivalence_class: str = ""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    changes: tuple[Change, ...]
    seconds: float
    sides: Sides | None = None
    exact: bool
    slots: frozenset[str] = frozenset()
    needs_new_trace: bool = False
    leaves_share: float = 1.0
    alloc_conf: str = ""
    empties_at: tuple[int, ...] = ()
    retains: tuple[RetainedPass, ...] = ()
    in_backward: Sides = Sides()
    host_bytes: int = 0
    disk_bytes: int = 0

    @property
    def added_sides(self) -> Sides:
        """What it adds to the card's side and to the host's."""
        return Sides.both(self.seconds) if self.sides is None else self.sides

    @property
    def is_of_the_allocator(self) -> bool:
        """Whether it changes no operator, only the allocator's behaviour."""
        return bool(self.alloc_conf or self.empties_at)

    @property
    def key(self) -> str:
        """The unique name of this option: the technique, the place and the settings."""
        settings = ",".join(f"{name}={value}" for name, value in sorted(self.settings.items()))
        return f"{self.technique}@{self.where}" + (f"({settings})" if settings else "")
