"""A layout: how a run is spread over cards, as numbers."""

import dataclasses
from typing import Any, Literal

Schedule = Literal["none", "gpipe", "1f1b", "interleaved"]
Recomputation = Literal["none", "selective", "alternate", "full"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One layout. Ranks are numbered with tp innermost, then cp, dp, and pp outermost; `ep` experts' groups lie inside dp x cp.

    `zero_stage` is 0 (each rank has all of its states: DDP), 1 (optimizer states are sharded), 2 (FSDP2 with `reshard_after_forward=False`: weights stay gathered from the
    forward to the backward pass) or 3 (they are gathered twice). States are sharded over `sharded_over` ranks of dp x cp and replicated over the others. Each rank runs
    `accumulation` micro-batches of `micro_batch` examples in a step. Of the blocks of a rank, `num_recomputed` are run again in the backward pass: as a whole
    (`full`), without their matrix products and attention (`selective`), or without attention and every second matrix product, the first among them (`alternate`, which
    is torchtitan's `selective_ac_option = "op"`). `stages_per_rank` is above 1 with the interleaved schedule alone. With `streams_weights` those of blocks, their gradients and their states are at the host of each rank,
    and come to its card one block ahead.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero_stage: int = 3
    sharded_over: int = 1
    micro_batch: int = 1
    accumulation: int = 1
    recompute: Recomputation = "none"
    num_recomputed: int = 0
    schedule: Schedule = "none"
    stages_per_rank: int = 1
    streams_weights: bool = False

    @property
    def num_gpus(self) -> int:
        """The cards that it uses."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def num_replicas(self) -> int:
        """How many copies of the states there are in dp x cp."""
        return self.dp * self.cp // self.sharded_over

    @property
    def is_gathered(self) -> bool:
        """Whether weights are gathered by FSDP, which converts them on the way."""
        return self.zero_stage >= 2 and self.sharded_over > 1

    def to_json(self) -> dict[str, Any]:
        """The object `layout` of `tightfit plan --gpus --json`."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        sizes = " x ".join(
            f"{name}{number}"
            for name in ("dp", "tp", "pp", "cp", "ep")
            if (number := getattr(self, name)) > 1 or name == "dp"
        )
        return f"{sizes}, {self.sharding}"

    @property
    def sharding(self) -> str:
        """The sharding in the words of FSDP2: what is sharded, and over how many ranks, and whether weights are streamed."""
        return f"{self._sharding}, weights streamed from the host" if self.streams_weights else self._sharding

    @property
    def _sharding(self) -> str:
        if self.sharded_over == 1 or self.zero_stage == 0:
            return "DDP" if self.dp * self.cp > 1 else "unsharded"
        name = {1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3"}[self.zero_stage]
        return name if self.num_replicas == 1 else f"{name} over {self.sharded_over}"
