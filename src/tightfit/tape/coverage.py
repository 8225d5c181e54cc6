"""What of a program a tape covers: where its training loops were left, where the trace ended, and which code was not reached."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

MAX_NAMED = 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NotReached:
    """Code that could use the GPU and did not run: `what` is a call (`evaluate()`), `where` its line, `condition` when it would run."""

    what: str
    where: str
    condition: str = ""

    @property
    def words(self) -> str:
        """The call with its line and its condition."""
        when = f" ({self.condition})" if self.condition else ""
        return f"{self.what} at {self.where}{when}" if self.where else f"{self.what}{when}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """`left_at` is the line of the first training loop that was left before its end, or of the end of the trace, and after which step; empty
    for a program that ran as it would without a trace. `stopped` says why the trace ended before the program, empty if it did not.

    After the steps turns of loops are counted: `cuts` are those at which a loop without training steps was left, `last_turn` the one at which the
    trace ended, 0 if it ended elsewhere: `last_call` is then how many calls of modules without gradients had begun by then. Another trace of the same
    program, with techniques, does the same at the same turns, or ends at the call after those.
    """

    left_at: str = ""
    stopped: str = ""
    cuts: tuple[int, ...] = ()
    last_turn: int = 0
    last_call: int = 0
    not_reached: tuple[NotReached, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether nothing that could use the GPU is known to be missing."""
        return not self.not_reached

    @property
    def words(self) -> str:
        """The clause that belongs to the verdict; empty where nothing is missing."""
        if self.is_whole:
            return ""
        named = [each.words for each in self.not_reached[:MAX_NAMED]]
        more = len(self.not_reached) - len(named)
        named += [f"and {more} more"] if more > 0 else []
        why = f" ({self.stopped})" if self.stopped else ""
        left = f"the program was left at {self.left_at}{why}; " if self.left_at else ""
        return f"{left}not reached: {', '.join(named)}"

    def to_json(self) -> dict[str, Any]:
        """The coverage as plain data."""
        plain = dataclasses.asdict(self)
        return plain | {"cuts": list(self.cuts), "not_reached": list(plain["not_reached"])}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """What `to_json` wrote."""
        return cls(
            left_at=value.get("left_at", ""),
            stopped=value.get("stopped", ""),
            cuts=tuple(value.get("cuts", ())),
            last_turn=value.get("last_turn", 0),
            last_call=value.get("last_call", 0),
            not_reached=tuple(NotReached(**each) for each in value.get("not_reached", ())),
        )
