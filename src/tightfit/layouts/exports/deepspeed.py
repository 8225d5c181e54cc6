"""DeepSpeed's configuration (JSON), as of 0.19.5: ZeRO over all ranks, with master weights in float32 where the program computes in half precision.

Sources: deepspeed/runtime/config.py (names and the batch), deepspeed/runtime/engine.py, `_do_optimizer_sanity_check` (types that go together), deepspeed/runtime/zero/config.py.
"""

import dataclasses
import json
import shlex
from collections.abc import Sequence
from typing import Any

from tightfit.layouts.exports.layout_run import Export, LayoutRun
from tightfit.layouts.exports.tool import AbstractTool, all_or_none, first_reason, with_master_weights
from tightfit.layouts.layout import Layout, Recomputation
from tightfit.layouts.model.model_parts import ModelParts

_HALVES = {"bfloat16": "bf16", "float16": "fp16"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeed(AbstractTool):
    """DeepSpeed 0.19.5."""

    name: str = "deepspeed"
    version: str = "0.19.5"

    def refusal(self, layout: Layout, model: ModelParts) -> str:
        """Why a configuration of DeepSpeed cannot say it."""
        others = max(layout.pp, layout.cp, layout.ep)
        return first_reason(
            (others > 1, "DeepSpeed has pipeline, context and expert parallelism in the program, not in its file"),
            (layout.tp > 1, "DeepSpeed's tensor parallelism keeps whole activations on each rank: not as priced"),
            (layout.sharded_over not in (1, layout.dp), "DeepSpeed shards over all ranks"),
            (
                layout.zero_stage == 0 and model.computed_dtype == "bfloat16",
                "DeepSpeed accumulates gradients in bfloat16 without ZeRO",
            ),
        )

    def recomputed(self, kind: Recomputation, layout: Layout, most: int) -> Sequence[int]:
        """All blocks as a whole, in the program."""
        return all_or_none(kind, most)

    def stored(self, model: ModelParts) -> ModelParts:
        """Half precision has master weights."""
        return with_master_weights(model)

    def export(self, run: LayoutRun) -> Export:
        """The JSON file, which has no comments: the notes are beside it."""
        layout = run.layout
        zero: dict[str, Any] = {"stage": layout.zero_stage}
        if layout.zero_stage:
            zero |= {"overlap_comm": True, "contiguous_gradients": True}
        if layout.zero_stage == 1 and run.computed_dtype == "bfloat16":
            # Its optimizer of bfloat16 has no such settings.
            zero = {"stage": 1}
        config: dict[str, Any] = {
            "train_batch_size": run.examples,
            "train_micro_batch_size_per_gpu": layout.micro_batch,
            "gradient_accumulation_steps": layout.accumulation,
            "zero_optimization": zero,
        }
        half = _HALVES.get(run.computed_dtype)
        if half:
            config[half] = {"enabled": True}
        if half == "bf16":
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        notes = [
            f"for DeepSpeed {self.version}, started with deepspeed --num_nodes {run.num_nodes} --num_gpus {run.gpus_per_node} {shlex.join(run.script)}"
        ]
        if half:
            notes.append(
                f"DeepSpeed's own {half} with master weights in float32, and no torch.autocast in the program: the layout is priced so"
            )
        if layout.num_recomputed:
            notes.append(
                "recomputation of all blocks is the program's own: model.gradient_checkpointing_enable() for Hugging Face's models"
            )
        return Export(
            tool=self.name,
            version=self.version,
            file_name="ds_config.json",
            text=json.dumps(config, indent=2) + "\n",
            notes=tuple(notes),
        )
