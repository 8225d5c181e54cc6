"""torchtitan's job file (TOML), as of 0.2.2, the last release that reads it: later ones are configured in Python with the same names.

Sources: torchtitan/config/job_config.py (names), torchtitan/models/llama3/infra/parallelize.py (what goes together),
torchtitan/distributed/activation_checkpoint.py (what is recomputed), torchtitan/distributed/pipeline_parallel.py (stages).
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from tightfit.layouts.exports.layout_run import Export, LayoutRun
from tightfit.layouts.exports.text_formats import comments, toml
from tightfit.layouts.exports.tool import AbstractTool, first_reason
from tightfit.layouts.layout import Layout, Recomputation
from tightfit.layouts.model.model_parts import ModelParts

_SCHEDULES = {"none": "1F1B", "1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B"}
_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Torchtitan(AbstractTool):
    """torchtitan 0.2.2."""

    name: str = "torchtitan"
    version: str = "0.2.2"

    def refusal(self, layout: Layout, model: ModelParts) -> str:
        """Why torchtitan cannot run it."""
        ranks = layout.dp * layout.cp
        is_divided, is_mixed = layout.tp * layout.pp > 1, model.stored_dtype != model.computed_dtype
        is_replicated = layout.zero_stage == 0
        return first_reason(
            (model.computed_dtype not in _DTYPES, f"torchtitan has no {model.computed_dtype}"),
            (layout.zero_stage == 1 and ranks > 1, "torchtitan has no ZeRO-1"),
            (
                is_replicated and (layout.cp > 1 or (layout.dp > 1 and is_divided)),
                "torchtitan replicates weights only where nothing else is divided",
            ),
            (
                is_replicated and is_divided and is_mixed,
                "torchtitan has mixed precision with tensor and pipeline parallelism only where FSDP shards",
            ),
            (layout.sharded_over % layout.cp > 0, "torchtitan shards over whole groups of context parallelism"),
        )

    def recomputed(self, kind: Recomputation, layout: Layout, most: int) -> Sequence[int]:
        """All blocks, as a whole also every second one, every third one, and so on; products are not all kept, but every second one."""
        if kind == "selective":
            return ()
        if kind == "alternate" or layout.pp > 1:
            return (most,) if most else ()
        return sorted({most // every for every in range(1, most + 1)})

    def stored(self, model: ModelParts) -> ModelParts:
        """As traced: weights, gradients and states in the program's type."""
        return model

    def export(self, run: LayoutRun) -> Export:
        """The TOML file. The model is chosen by its name in torchtitan, which no trace knows."""
        layout = run.layout
        tables = {
            "training": _training(run),
            "parallelism": _parallelism(run),
            "activation_checkpoint": _checkpointing(run),
        }
        notes = [
            f"{run.layout}: for torchtitan {self.version}, of {run.layout.num_gpus} GPUs on {run.num_nodes} node{'s' if run.num_nodes > 1 else ''}.",
            "Choose the model, its tokenizer and the data in [model] and [training]: they are torchtitan's own.",
        ]
        if layout.pp > 1:
            notes.append("module_fqns_per_model_part has the names of torchtitan's Llama, Qwen and DeepSeek models.")
        if layout.ep > 1:
            notes.append(
                "Experts are divided among ranks of data and context parallelism, and not by tensor parallelism besides."
            )
        launch = f"Start it: torchrun with {run.gpus_per_node} processes on each node, -m torchtitan.train --job.config_file layout.toml"
        return Export(
            tool=self.name,
            version=self.version,
            file_name="layout.toml",
            text=comments([*notes, launch]) + "\n" + toml(tables),
            notes=tuple(notes[1:]),
        )


def _training(run: LayoutRun) -> dict[str, Any]:
    layout = run.layout
    local = layout.micro_batch * (layout.accumulation if layout.pp > 1 else 1)
    found: dict[str, Any] = {"local_batch_size": local, "global_batch_size": run.examples}
    if run.sequence_length:
        found["seq_len"] = run.sequence_length
    return found | {"dtype": run.stored_dtype, "mixed_precision_param": run.computed_dtype}


def _parallelism(run: LayoutRun) -> dict[str, Any]:
    layout = run.layout
    is_sharded = layout.zero_stage >= 2
    found: dict[str, Any] = {
        "data_parallel_replicate_degree": layout.num_replicas if is_sharded else layout.dp,
        "data_parallel_shard_degree": layout.sharded_over // layout.cp if is_sharded else 1,
        "fsdp_reshard_after_forward": "always" if layout.zero_stage == 3 else "never",
        "tensor_parallel_degree": layout.tp,
        "context_parallel_degree": layout.cp,
        "pipeline_parallel_degree": layout.pp,
    }
    if layout.ep > 1:
        found |= {"expert_parallel_degree": layout.ep, "expert_tensor_parallel_degree": 1}
    if layout.pp > 1:
        found |= {
            "pipeline_parallel_schedule": _SCHEDULES[layout.schedule],
            "pipeline_parallel_microbatch_size": layout.micro_batch,
            "module_fqns_per_model_part": _modules(run.stage_blocks),
        }
    return found


def _modules(stage_blocks: Sequence[int]) -> list[list[str]]:
    """The modules of each stage, by their names in torchtitan's decoders."""
    ends = list(itertools.accumulate(stage_blocks, initial=0))
    stages = [[f"layers.{i}" for i in range(begin, end)] for begin, end in itertools.pairwise(ends)]
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "output"]
    return stages


def _checkpointing(run: LayoutRun) -> dict[str, Any]:
    layout = run.layout
    if not layout.num_recomputed or layout.recompute == "none":
        return {"mode": "none"}
    if layout.recompute == "alternate":
        return {"mode": "selective", "selective_ac_option": "op"}
    of_rank = run.num_blocks // layout.pp
    every = 1 if layout.pp > 1 else of_rank // layout.num_recomputed
    return {"mode": "full"} if every == 1 else {"mode": "selective", "selective_ac_option": str(every)}
