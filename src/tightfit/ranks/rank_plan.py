"""What a layout asks of the ranks of a run."""

import dataclasses

from tightfit.planner.plan import Choice


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """Whether each rank keeps the optimizer states of its share of the parameters alone, the blocks (by their modules) that it runs again in its backward pass, and how many examples it has
    in a micro-batch where it accumulates."""

    shards_states: bool = False
    recomputed: tuple[str, ...] = ()
    micro_batch: int | None = None

    def choices(self) -> list[Choice]:
        """What is put on the models, as a plan of one card has it. What it saves and costs is in the layout, of all together."""
        return [
            Choice(technique="checkpointing", where=where, settings={}, saves_bytes=0, adds_seconds=0.0, exact=True)
            for where in self.recomputed
        ]
