"""Options: one concrete choice of a technique each, as numbers. They are all that a planner sees of a technique.

What an option does to memory is a list of changes, each a stretch of the tape's events with the bytes that are more or fewer alive there.
A change has no notion of a budget or of a peak; which moments matter is found from all options together (`tightfit.planner.problem`).
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """`num_bytes` more (or, negative, fewer) are alive after each of the events from `begin` to before `end`."""

    begin: int
    end: int
    num_bytes: int


def merged(changes: Iterable[Change]) -> tuple[Change, ...]:
    """The same changes as disjoint stretches, in order: each says what all of them together do there."""
    steps: dict[int, int] = {}
    for change in changes:
        steps[change.begin] = steps.get(change.begin, 0) + change.num_bytes
        steps[change.end] = steps.get(change.end, 0) - change.num_bytes
    found, level = [], 0
    borders = sorted(steps)
    for begin, end in itertools.pairwise(borders):
        level += steps[begin]
        if level:
            found.append(Change(begin=begin, end=end, num_bytes=level))
    return tuple(found)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One choice of a technique at one place.

    `where` is the place: a path of the module tree that begins with the class of the model ("GPT2LMHeadModel.transformer.h.3"), or a word for
    what has no module ("optimizer", "allocator"). Places whose options are interchangeable but for their position carry the same `alike`.
    `settings` is what `AbstractTechnique.apply` needs, as JSON. `seconds` are added to each step (negative: saved).

    Of the options that share a member of `slots` at most one is chosen: a module that is checkpointed, say, takes the slots of all that lies
    inside it. `is_coarse`: it changes the run so much that the other options must be worked out again on a tape of it; until then, where it saves
    the others are taken to save `leaves_share` of what they do without it. `alloc_conf` are settings of the allocator, `empties_at` events before which its cache is emptied: what these are worth is found by replaying a traced run
    with them.
    """

    technique: str
    where: str
    alike: str = ""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    changes: tuple[Change, ...]
    seconds: float
    exact: bool
    slots: frozenset[str] = frozenset()
    is_coarse: bool = False
    leaves_share: float = 1.0
    alloc_conf: str = ""
    empties_at: tuple[int, ...] = ()
    host_bytes: int = 0
    disk_bytes: int = 0

    @property
    def is_of_the_allocator(self) -> bool:
        """Whether it changes no operator, but only how the allocator works."""
        return bool(self.alloc_conf or self.empties_at)

    @property
    def key(self) -> str:
        """What names this option among all of a plan's: the technique, the place and the settings."""
        settings = ",".join(f"{name}={value}" for name, value in sorted(self.settings.items()))
        return f"{self.technique}@{self.where}" + (f"({settings})" if settings else "")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What could be done where applying is not ours: another batch size, another card. Never part of a plan."""

    technique: str
    what: str
    saves_bytes: int
    is_exact: bool
