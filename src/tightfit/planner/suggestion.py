"""Suggestions: what a person could do that tightfit does not do for them, and the one order in which they are said. Never part of a plan.

Two sources make them: `tightfit.diagnosis.suggestions.from_history` of what a run was seen to hold, and `from_profile` (with the techniques' own advice) of a
workload that is planned for.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Literal, get_args

from tightfit.units import format_bytes_change

Changed = Literal["nothing", "batch", "results", "model", "GPU"]
"""What is another one if a suggestion is followed, the least first: nothing that is computed, the size of the batch or of its sequences, the results (in
the order of sums, in precision), the model or what of it is trained, the GPU."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """`what` to do at `where`: how much the peak of `saves` falls, and the seconds that it adds to each step (None where not known).

    `is_one_line`: one line in the user's loop, which costs neither time nor exactness. `splits_batch`: of a batch of one example there is no part. `effect` says in words what is saved, where that is more than one
    figure; `note` what to know of it.
    """

    what: str
    where: str = ""
    changes: Changed = "nothing"
    saves: Literal["allocated", "reserved"] = "allocated"
    saves_bytes: int
    adds_seconds: float | None = None
    effect: str = ""
    note: str = ""
    is_one_line: bool = False
    splits_batch: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether the results are the same."""
        return self.changes == "nothing"

    @property
    def rank(self) -> tuple[int, float, int]:
        """The sort key, best first: one line for nothing; then bytes per second lost; then those of unknown cost, by what they change and by bytes."""
        if self.is_one_line:
            return (0, 0.0, -self.saves_bytes)
        if self.adds_seconds is None:
            return (2 + get_args(Changed).index(self.changes), 0.0, -self.saves_bytes)
        return (1, -self.saves_bytes / self.adds_seconds if self.adds_seconds else -math.inf, -self.saves_bytes)

    @property
    def sentence(self) -> str:
        """All of it as one sentence."""
        saved = f" (up to {format_bytes_change(-self.saves_bytes)})" if self.saves_bytes > 0 else ""
        place = f" ({self.where})" if self.where else ""
        return f"{self.what}{place}{f' {self.effect}' if self.effect else saved}{f'; {self.note}' if self.note else ''}"

    def to_json(self) -> dict[str, Any]:
        """The object of it in `tightfit doctor --json`."""
        found = dataclasses.asdict(self) | {"is_exact": self.is_exact}
        found.pop("effect")
        found.pop("splits_batch")
        return found


def in_order(suggestions: Iterable[Suggestion]) -> tuple[Suggestion, ...]:
    """The suggestions, what saves most for nothing first."""
    return tuple(sorted(suggestions, key=lambda one: one.rank))
