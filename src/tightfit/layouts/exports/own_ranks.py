"""What `tightfit run --gpus --plan` runs of an unmodified script of one card: data parallelism and ZeRO-1 over all GPUs, with blocks recomputed as a whole and
micro-batches one after another, or with weights streamed from the host."""

import dataclasses
import json
import shlex
from collections.abc import Sequence
from typing import Any

from tightfit import __version__
from tightfit.layouts.exports.layout_run import Export, LayoutRun
from tightfit.layouts.exports.tool import AbstractTool, first_reason, joint_optimizers
from tightfit.layouts.layout import Layout, Recomputation
from tightfit.layouts.model.blocks_at_host import BlocksAtHost
from tightfit.layouts.model.model_parts import ModelParts
from tightfit.units import format_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OwnRanks(AbstractTool):
    """tightfit's own ranks (`tightfit.ranks`)."""

    name: str = "tightfit"
    version: str = __version__
    streams_weights: bool = True
    updates_shares: bool = True

    def refusal(self, layout: Layout, model: ModelParts) -> str:
        """Why an unmodified script cannot be run so."""
        joint = joint_optimizers(model)
        return ranks_refusal(layout) or first_reason(
            (bool(joint) and layout.zero_stage >= 1, f"it shards optimizer states, and {joint}")
        )

    def recomputed(self, kind: Recomputation, layout: Layout, most: int) -> Sequence[int]:
        """Any number of blocks, as a whole."""
        return range(1, most + 1) if kind == "full" else ()

    def stored(self, model: ModelParts) -> ModelParts:
        """As traced. Gradients are there a second time while they are summed, as in the buckets of DistributedDataParallel."""
        return model

    def export(self, run: LayoutRun) -> Export:
        """The JSON file that `--plan` reads."""
        streamed = run.at_host if run.layout.streams_weights else None
        told: dict[str, Any] = {
            "device": run.device,
            "layout": run.layout.to_json(),
            "recomputed": list(run.recomputed),
            **({} if streamed is None else {"streamed": streamed.to_json()}),
            "global_batch": run.examples,
        }
        command = ["tightfit", "run", "--gpus", str(run.layout.num_gpus), "--plan", "layout.json", run.script[0]]
        rest = ["--", *run.script[1:]] if run.script[1:] else []
        return Export(
            tool=self.name,
            version=self.version,
            file_name="layout.json",
            text=json.dumps(told, indent=2) + "\n",
            notes=(f"run it with {shlex.join([*command, *rest])}", *_host_notes(run, streamed)),
        )


def _host_notes(run: LayoutRun, streamed: BlocksAtHost | None) -> tuple[str, ...]:
    if streamed is None:
        return ()
    # Each process has the weights and memory for as many gradients, and its share of the states.
    trained = streamed.weight_bytes * streamed.trained_share
    of_states = trained * run.states_per_parameter * run.gpus_per_node / run.layout.num_gpus
    num_bytes = round(run.gpus_per_node * 2 * streamed.weight_bytes + of_states)
    return (
        f"weights, gradients and optimizer states of {len(streamed.settings['blocks'])} blocks are in host memory: {format_bytes(num_bytes)} on each machine, for {run.gpus_per_node} processes",
    )


def ranks_refusal(layout: Layout) -> str:
    """Why an unmodified script cannot be run with this layout; empty if it can."""
    degrees = {name: getattr(layout, name) for name in ("tp", "pp", "cp", "ep")}
    split = [f"{name}{degree}" for name, degree in degrees.items() if degree > 1]
    told = " x ".join([f"dp{layout.dp}", *split])
    return first_reason(
        (layout.num_gpus == 1, "it is for one GPU, for which tightfit plan without --gpus is"),
        (bool(split), f"it is for {told}, and an unmodified script is run with dp{layout.dp} alone"),
        (
            layout.zero_stage >= 2 and layout.sharded_over > 1,
            "it shards weights and gradients, which an unmodified script holds whole",
        ),
        (
            layout.zero_stage == 1 and layout.sharded_over not in (1, layout.dp),
            "it shards states over some of the GPUs",
        ),
        (
            layout.num_recomputed > 0 and layout.recompute != "full",
            "it recomputes parts of blocks, and on several GPUs whole ones are",
        ),
        (layout.streams_weights and layout.accumulation > 1, "it streams weights and accumulates over micro-batches"),
    )
