"""Accelerate's configuration file (YAML), as of 1.15: DistributedDataParallel, or FSDP2 with its mesh of replicas, shards and context parallelism.

Sources: accelerate/commands/config/config_args.py (`ClusterConfig`), accelerate/utils/launch.py (what is read of it), accelerate/parallelism_config.py (what goes together).
"""

import dataclasses
import shlex
from collections.abc import Sequence
from typing import Any

from tightfit.layouts.exports.layout_run import Export, LayoutRun
from tightfit.layouts.exports.text_formats import comments, yaml
from tightfit.layouts.exports.tool import AbstractTool, all_or_none, first_reason
from tightfit.layouts.layout import Layout, Recomputation
from tightfit.layouts.model.model_parts import ModelParts

_PRECISIONS = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}
_MESH = "parallelism_config_"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Accelerate(AbstractTool):
    """Hugging Face Accelerate 1.15."""

    name: str = "accelerate"
    version: str = "1.15.0"

    def refusal(self, layout: Layout, model: ModelParts) -> str:
        """Why Accelerate cannot run it."""
        ranks = layout.dp * layout.cp
        only_replicas = layout.num_replicas > 1 and layout.sharded_over == layout.cp
        return first_reason(
            (max(layout.pp, layout.ep) > 1, "Accelerate's FSDP has neither pipeline nor expert parallelism"),
            (layout.tp > 1, "Accelerate's tensor parallelism keeps whole activations on each rank: not as priced"),
            (layout.zero_stage == 1 and ranks > 1, "Accelerate's FSDP has no ZeRO-1"),
            (layout.zero_stage == 0 and layout.cp > 1, "Accelerate's context parallelism needs FSDP2"),
            (layout.sharded_over % layout.cp > 0, "Accelerate shards over whole groups of context parallelism"),
            (
                layout.cp > 1 and only_replicas,
                "Accelerate's context parallelism takes replicas only where data ranks shard",
            ),
        )

    def recomputed(self, kind: Recomputation, layout: Layout, most: int) -> Sequence[int]:
        """All blocks as a whole, which FSDP's plugin wraps."""
        return all_or_none(kind, most)

    def stored(self, model: ModelParts) -> ModelParts:
        """As traced."""
        return model

    def export(self, run: LayoutRun) -> Export:
        """The YAML file; the batch is the script's own."""
        layout = run.layout
        is_recomputed = bool(layout.num_recomputed)
        notes = [
            f"{layout}: for Accelerate {self.version}, on {run.num_nodes} node{'s' if run.num_nodes > 1 else ''}.",
            f"The script's own: batches of {layout.micro_batch} for each process, Accelerator(gradient_accumulation_steps={layout.accumulation}).",
        ]
        if is_recomputed and layout.zero_stage < 2:
            notes.append(
                "The script's own too: recomputation of all blocks, model.gradient_checkpointing_enable() for Hugging Face's models."
            )
        if is_recomputed and layout.zero_stage >= 2:
            notes.append(
                "fsdp_activation_checkpointing does not restore the random state: with dropout its gradients are wrong. Leave it at 0, or recompute in the model."
            )
        if layout.cp > 1:
            notes.append(
                "Context parallelism needs scaled_dot_product_attention, and each batch inside of accelerator.maybe_context_parallel."
            )
        launch = f"Start it on each node: accelerate launch --config_file layout.yaml{_of_machine(run)} {shlex.join(run.script)}"
        return Export(
            tool=self.name,
            version=self.version,
            file_name="layout.yaml",
            text=comments([*notes, launch]) + yaml(_config(run)),
            notes=tuple(notes[1:]),
        )


def _of_machine(run: LayoutRun) -> str:
    return " --machine_rank RANK --main_process_ip ADDRESS" if run.num_nodes > 1 else ""


def _config(run: LayoutRun) -> dict[str, Any]:
    layout = run.layout
    is_sharded = layout.zero_stage >= 2 and layout.sharded_over > 1
    kind = "FSDP" if is_sharded else "MULTI_GPU" if layout.num_gpus > 1 else "NO"
    found: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": _PRECISIONS[run.computed_dtype] if run.is_mixed else "no",
        "num_machines": run.num_nodes,
        "num_processes": layout.num_gpus,
        "main_process_port": 29500,
        "rdzv_backend": "static",
        "main_training_function": "main",
        "use_cpu": False,
    }
    if is_sharded:
        found["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": layout.zero_stage == 3,
            **_wrapping(run.block_classes),
            "fsdp_activation_checkpointing": bool(layout.num_recomputed),
            "fsdp_offload_params": False,
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    if is_sharded and (layout.num_replicas > 1 or layout.cp > 1):
        found["parallelism_config"] = {
            f"{_MESH}dp_replicate_size": layout.num_replicas,
            f"{_MESH}dp_shard_size": layout.sharded_over // layout.cp,
            f"{_MESH}tp_size": 1,
            f"{_MESH}cp_size": layout.cp,
        }
    return found


def _wrapping(classes: Sequence[str]) -> dict[str, Any]:
    """What is sharded as one: the blocks, by the names of their classes."""
    if not classes:
        return {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 100_000_000}
    return {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": ",".join(classes)}
