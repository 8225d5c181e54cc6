"""What a layout asks of the ranks of a run."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tightfit.planner.plan import Choice

_CHECKPOINTING, _STREAMING = "checkpointing", "trained_weight_streaming"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """Whether each rank keeps the optimizer states of its share of the parameters alone, the blocks (by their modules) that it runs again in its backward pass, how many examples it has
    in a micro-batch where it accumulates, and the settings of `trained_weight_streaming` with the model that they are for (`where`), if weights are streamed."""

    shards_states: bool = False
    recomputed: tuple[str, ...] = ()
    micro_batch: int | None = None
    streamed: Mapping[str, Any] | None = None

    def places(self) -> list[tuple[str, str]]:
        """The blocks that it names, each with what it does to it."""
        found = [("recomputes", where) for where in self.recomputed]
        if self.streamed is not None:
            found += [("streams", f"{self.streamed['where']}.{block}") for block in self.streamed["blocks"]]
        return found

    def choices(self) -> list[Choice]:
        """What is put on the models, as a plan of one card has it. What it saves and costs is in the layout, of all together."""
        found = [(_CHECKPOINTING, where, {}) for where in self.recomputed]
        if self.streamed is not None:
            settings = {name: value for name, value in self.streamed.items() if name != "where"}
            found.append((_STREAMING, self.streamed["where"], settings))
        return [
            Choice(technique=technique, where=where, settings=settings, saves_bytes=0, adds_seconds=0.0, exact=True)
            for technique, where, settings in found
        ]
