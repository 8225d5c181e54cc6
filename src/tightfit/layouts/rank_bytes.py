"""GPU memory of a rank under a layout, by class.

states         parameters, gradients and optimizer states, each divided by tp and by the ranks that share them
gathered       weights and gradients of whole blocks: two blocks' at once with ZeRO-3 (the one that computes and the one that is prefetched), all with ZeRO-2
activations    what the blocks of a stage save for backward, for each micro-batch in flight; of a recomputed block its input alone
working        the larger of: temporaries and logits around the loss; temporaries of a block's backward pass, with what its recomputation makes again
other          inputs, NCCL's buffers, the CUDA context, and what the caching allocator reserves and cannot use
"""

import dataclasses
import functools

from tightfit.cost.collectives import Group
from tightfit.cost.communicators import communicator_bytes
from tightfit.devices.device import Device
from tightfit.devices.node import Node
from tightfit.layouts.layout import Layout
from tightfit.layouts.model_parts import ModelPart, ModelParts
from tightfit.layouts.stages import Stage

FRAGMENTATION = 0.03
"""What is reserved and unused, as a share of activations, gathered weights and working memory: blocks of unlike sizes come and go. Reserved above allocated is 2 to 5 % in the
published runs of torchtitan with the default allocator."""
CLASSES = (
    "parameters",
    "gradients",
    "optimizer_state",
    "gathered",
    "activations",
    "working",
    "inputs",
    "nccl",
    "cache",
    "context",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """GPU memory of one rank at its peak, by class, in bytes."""

    rank: int
    role: str
    by_class: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """The peak of the process on the card."""
        return sum(self.by_class.values())


def rank_bytes(model: ModelParts, layout: Layout, stage: Stage, device: Device, node: Node) -> RankBytes:
    """The memory of a rank of `stage`."""
    share = _share(model, layout)
    states = _states(model, layout, stage)
    activations, working = _activations(model, layout, stage, share)
    gathered = _gathered(model, layout, stage)
    inputs = round(model.input_bytes * share)
    moving = activations + working + gathered
    return RankBytes(
        rank=stage.rank,
        role=_role(stage, layout),
        by_class={
            **states,
            "gathered": gathered,
            "activations": activations,
            "working": working,
            "inputs": inputs,
            "nccl": _communicators(_plain(layout), node),
            "cache": round(FRAGMENTATION * moving),
            "context": device.context_bytes,
        },
    )


def _share(model: ModelParts, layout: Layout) -> float:
    """The share of the traced micro-batch's tokens that a rank has at once."""
    return layout.micro_batch / (model.batch.num_examples or 1) / layout.cp


def _stored(model: ModelParts, layout: Layout, part: ModelPart, tied_bytes: int = 0) -> tuple[float, float]:
    """The bytes of the weights of a part on a rank before they are sharded: those of experts, and the others, without `tied_bytes` that another part has."""
    dense = part.parameter_bytes - part.expert_bytes - tied_bytes
    return (
        part.expert_bytes / layout.tp / layout.ep * model.stored_per_parameter,
        dense / layout.tp * model.stored_per_parameter,
    )


def _states(model: ModelParts, layout: Layout, stage: Stage) -> dict[str, int]:
    parameters = gradients = optimizer = 0.0
    over = layout.sharded_over
    for _, part, count in stage.parts(model):
        experts, dense = _stored(model, layout, part, stage.tied_bytes(model) if part is model.after else 0)
        # Experts are divided by ep already, and sharded over the ranks that have the same ones.
        sharded = dense / over + experts / max(1, over // layout.ep)
        whole = dense + experts
        trained = part.trained_bytes / part.parameter_bytes if part.parameter_bytes else 0.0
        parameters += count * (sharded if layout.zero_stage >= 2 else whole)
        gradients += count * trained * (sharded if layout.zero_stage >= 2 else whole) * model.gradients_per_parameter
        optimizer += count * trained * (sharded if layout.zero_stage >= 1 else whole) * model.states_per_parameter
    return {"parameters": round(parameters), "gradients": round(gradients), "optimizer_state": round(optimizer)}


def _gathered(model: ModelParts, layout: Layout, stage: Stage) -> int:
    """Whole weights as they are computed with, and whole gradients before they are reduced."""
    if layout.zero_stage < 2 or layout.sharded_over == 1:
        return 0
    weights = [
        sum(_stored(model, layout, part)) * model.gathered_per_parameter
        for _, part, n in stage.parts(model)
        for _ in range(min(n, 2))
    ]
    blocks = [sum(_stored(model, layout, part)) for i, part, _ in stage.parts(model) if 0 < i <= len(model.blocks)]
    ends = [sum(_stored(model, layout, part)) for i, part, _ in stage.parts(model) if not 0 < i <= len(model.blocks)]
    if layout.zero_stage == 2:
        all_weights = sum(
            n * sum(_stored(model, layout, part)) * model.gathered_per_parameter for _, part, n in stage.parts(model)
        )
        largest = max(weights, default=0.0)
        return round(all_weights + largest * model.reduced_per_gathered)
    block = max(blocks, default=0.0)
    # The part after the blocks is gathered from its forward to its backward pass; that of the embedding only while it computes.
    weights_at_once = 2 * block * model.gathered_per_parameter + max(ends, default=0.0) * model.gathered_per_parameter
    gradient = max(block, max(ends, default=0.0)) * model.gathered_per_parameter * model.reduced_per_gathered
    return round(weights_at_once + gradient)


def _activations(model: ModelParts, layout: Layout, stage: Stage, share: float) -> tuple[int, int]:
    """What is saved for backward, and the working memory on top of it at the worst moment."""
    per_rank, left = 0.0, layout.num_recomputed
    tp = layout.tp
    working = 0.0
    for i, part, count in stage.parts(model):
        if not 0 < i <= len(model.blocks):
            # The loss and the embedding are done with before the next micro-batch comes.
            working = max(working, (part.saved_bytes + part.working_bytes) * share / tp)
            continue
        # With tensor parallelism the inputs of each half of a block are gathered over tp, and saved so.
        whole_inputs = min(2.0, part.num_products) * part.input_bytes * (1 - 1 / tp)
        plain = part.saved_bytes / tp + whole_inputs
        kept = {
            "none": plain,
            "selective": (part.product_bytes + part.input_bytes) / tp,
            "alternate": (part.alternate_bytes + part.input_bytes) / tp,
            "full": part.input_bytes / tp,
        }[layout.recompute]
        kept = min(kept, plain)
        again = min(count, left)
        left -= again
        per_rank += ((count - again) * plain + again * kept) * share
        made_again = plain - kept if again else 0.0
        working = max(working, (part.working_bytes / tp + made_again) * share)
    return round(per_rank * stage.in_flight), round(working)


def _plain(layout: Layout) -> Layout:
    """The layout without what communicators do not depend on."""
    return dataclasses.replace(
        layout,
        micro_batch=1,
        accumulation=1,
        recompute="none",
        num_recomputed=0,
        schedule="none",
        stages_per_rank=1,
        zero_stage=min(1, layout.zero_stage),
    )


@functools.lru_cache(maxsize=4096)
def _communicators(layout: Layout, node: Node) -> int:
    """NCCL's buffers for the groups of a rank."""
    tp, cp = layout.tp, layout.cp
    rings = ("all_gather", "reduce_scatter")
    # Size, how far apart its ranks are, and what it runs.
    groups = [
        (layout.sharded_over, tp, rings if layout.zero_stage else ("all_reduce",)),
        (layout.num_replicas, tp * layout.sharded_over, ("all_reduce",)),
        (tp, 1, rings),
        (cp, tp, rings),
        (layout.ep, tp * cp, ("all_to_all",)),
    ]
    found = sum(
        communicator_bytes(node, Group.of(size, stride=stride, num_linked=node.num_linked), kinds)
        for size, stride, kinds in groups
    )
    neighbours = Group.of(min(2, layout.pp), stride=layout.num_gpus // layout.pp, num_linked=node.num_linked)
    return found + communicator_bytes(node, neighbours, ("send",), num_peers=min(2, layout.pp - 1))


def _role(stage: Stage, layout: Layout) -> str:
    if layout.pp == 1:
        return "every rank"
    if stage.has_before:
        return "first stage"
    return "last stage" if stage.has_after else f"stage {stage.rank + 1} of {layout.pp}"
