"""Arguments of Megatron-LM, as of core 0.16.1, in a file for a shell: tensor parallelism with sequence parallelism, stages by their blocks, the distributed optimizer.

Sources: megatron/training/arguments.py (names, `validate_args`), megatron/core/transformer/pipeline_parallel_layer_layout.py (the stages), megatron/core/transformer/transformer_config.py
(recomputation, whose number of layers is that of each virtual stage).
"""

import dataclasses
from collections.abc import Sequence

from tightfit.layouts.exports.layout_run import Export, LayoutRun
from tightfit.layouts.exports.text_formats import comments
from tightfit.layouts.exports.tool import AbstractTool, first_reason, with_master_weights
from tightfit.layouts.layout import Layout, Recomputation
from tightfit.layouts.model.model_parts import ModelParts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Megatron(AbstractTool):
    """Megatron-LM, core 0.16.1."""

    name: str = "megatron"
    version: str = "core 0.16.1"

    def refusal(self, layout: Layout, model: ModelParts) -> str:
        """Why these arguments cannot say it."""
        return first_reason(
            (layout.zero_stage >= 2, "layouts for Megatron-LM have its distributed optimizer, which is ZeRO-1"),
            (
                layout.zero_stage == 1 and layout.num_replicas > 1,
                "Megatron-LM's distributed optimizer shards over all ranks",
            ),
        )

    def recomputed(self, kind: Recomputation, layout: Layout, most: int) -> Sequence[int]:
        """The first blocks of each virtual stage, as a whole: as many on each stage of a rank."""
        if kind != "full":
            return ()
        return [n * layout.stages_per_rank for n in range(1, most // layout.stages_per_rank + 1)]

    def stored(self, model: ModelParts) -> ModelParts:
        """Half precision has master weights, and gradients in float32."""
        return with_master_weights(model)

    def export(self, run: LayoutRun) -> Export:
        """A file to source, with the arguments in an array."""
        notes = (
            f"{run.layout}: for Megatron-LM {self.version}, {run.layout.num_gpus} GPUs on {run.num_nodes} node{'s' if run.num_nodes > 1 else ''}.",
            "The model's own arguments come besides (--hidden-size, --num-attention-heads, --ffn-hidden-size, --max-position-embeddings ...), and those of data and optimizer.",
            "Experts need theirs too (--num-experts, --moe-router-topk ...)." if run.layout.ep > 1 else "",
            'Start it: source layout.sh; torchrun ... pretrain_gpt.py "${LAYOUT_ARGS[@]}" ...',
        )
        given = [note for note in notes if note]
        lines = "".join(f"    {argument}\n" for argument in _arguments(run))
        return Export(
            tool=self.name,
            version=self.version,
            file_name="layout.sh",
            text=f"{comments(given)}LAYOUT_ARGS=(\n{lines})\n",
            notes=tuple(given[1:-1]),
        )


def _arguments(run: LayoutRun) -> list[str]:
    layout = run.layout
    found = [
        f"--num-layers {run.num_blocks}",
        f"--tensor-model-parallel-size {layout.tp}",
        f"--pipeline-model-parallel-size {layout.pp}",
        f"--context-parallel-size {layout.cp}",
        f"--micro-batch-size {layout.micro_batch}",
        f"--global-batch-size {run.examples}",
    ]
    if run.sequence_length:
        found.append(f"--seq-length {run.sequence_length}")
    if layout.tp > 1:
        found.append("--sequence-parallel")
    if layout.ep > 1:
        # Else tensor parallelism divides experts as well, which ep has divided already.
        found += [f"--expert-model-parallel-size {layout.ep}", "--expert-tensor-parallel-size 1"]
    if layout.pp > 1:
        found.append(f"--pipeline-model-parallel-layout '{_stages(run.stage_blocks)}'")
    if layout.zero_stage == 1:
        found.append("--use-distributed-optimizer")
    if layout.dp * layout.cp > 1:
        found.append("--overlap-grad-reduce")
    if layout.zero_stage == 1:
        found.append("--overlap-param-gather")
    if layout.num_recomputed:
        each = layout.num_recomputed // layout.stages_per_rank
        found += ["--recompute-granularity full", "--recompute-method block", f"--recompute-num-layers {each}"]
    half = {"bfloat16": "--bf16", "float16": "--fp16"}.get(run.computed_dtype)
    return [*found, half] if half else found


def _stages(stage_blocks: Sequence[int]) -> str:
    """The stages in Megatron-LM's words: E embeds, t is a block, L has the loss."""
    stages = [f"t*{number}" if number else "" for number in stage_blocks]
    stages[0] = f"E{stages[0]}"
    stages[-1] += "L"
    return "|".join(stages)
