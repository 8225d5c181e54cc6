"""GPU memory of a rank under a layout, by class, at the moment when it is most (`moments.py`).

states         parameters, gradients and optimizer states, each divided by tp and by the ranks that share them
gathered       weights and gradients of whole parts, as FSDP gathers and reduces them
communication  buckets of DistributedDataParallel
activations    what the blocks of a stage save for backward, for each micro-batch in flight; of a recomputed block its input alone
working        temporaries around the loss, of a block's backward pass with what its recomputation makes again, or of the update
other          inputs, NCCL's buffers, the CUDA context, and what the caching allocator reserves and does not use: as in the traced step
"""

import dataclasses
import functools

from tightfit.cost.collectives import Group
from tightfit.cost.communicators import communicator_bytes
from tightfit.devices.device import Device
from tightfit.devices.node import Node
from tightfit.layouts.layout import Layout
from tightfit.layouts.model.model_parts import ModelParts
from tightfit.layouts.moments import moments, stored_bytes
from tightfit.layouts.stages import Stage

FRAGMENTATION = 0.03
"""The least that is reserved and unused with FSDP, as a share of activations, gathered weights and working memory: blocks of unlike sizes come and go. Reserved above allocated
is 2 to 5 % in the published runs of torchtitan with the default allocator."""


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
    """The memory of a rank of `stage`, at the moment when it is most."""
    share = _share(model, layout)
    states = _states(model, layout, stage)
    of_rank = moments(model, layout, stage, share)
    worst = max(of_rank, key=lambda moment: moment.total(states["gradients"]))
    of_weights = 1.0 / layout.sharded_over if layout.is_gathered else 1.0
    unused = model.unused_bytes / layout.tp * (share if model.unused_by_tokens else of_weights)
    moving = worst.activations + worst.working + worst.gathered
    # Gathered weights come and go besides what one card has traced.
    cache = max(unused, FRAGMENTATION * moving) if layout.is_gathered else unused
    return RankBytes(
        rank=stage.rank,
        role=_role(stage, layout),
        by_class={
            **states,
            "gradients": round(worst.gradients * states["gradients"]),
            "gathered": round(worst.gathered),
            "communication": _buckets(model, layout, states),
            "activations": round(worst.activations),
            "working": round(worst.working),
            "workspace": model.workspace_bytes,
            "inputs": round(model.input_bytes * share),
            "nccl": _communicators(_plain(layout), node),
            "cache": round(cache),
            "context": device.context_bytes,
        },
    )


def is_of_tokens(model: ModelParts, layout: Layout, stage: Stage) -> bool:
    """Whether a rank of `stage` is at its peak where activations are, or where gradients or the update are."""
    of_rank = moments(model, layout, stage, _share(model, layout))
    gradients = _states(model, layout, stage)["gradients"]
    return max(of_rank, key=lambda moment: moment.total(gradients)).is_of_tokens


def _share(model: ModelParts, layout: Layout) -> float:
    """The share of the traced micro-batch's tokens that a rank has at once."""
    return layout.micro_batch / (model.batch.num_examples or 1) / layout.cp


def _states(model: ModelParts, layout: Layout, stage: Stage) -> dict[str, int]:
    parameters = gradients = optimizer = 0.0
    over = layout.sharded_over
    for _, part, count in stage.parts(model):
        experts, dense = stored_bytes(model, layout, part, stage.tied_bytes(model) if part is model.after else 0)
        # Experts are divided by ep already, and sharded over the ranks that have the same ones.
        sharded = dense / over + experts / max(1, over // layout.ep)
        whole = dense + experts
        trained = part.trained_bytes / part.parameter_bytes if part.parameter_bytes else 0.0
        parameters += count * (sharded if layout.zero_stage >= 2 else whole)
        gradients += count * trained * (sharded if layout.zero_stage >= 2 else whole) * model.gradients_per_parameter
        optimizer += count * trained * (sharded if layout.zero_stage >= 1 else whole) * model.states_per_parameter
    if layout.streams_weights and model.at_host is not None:
        gone, all_of_it, share = model.at_host.gone_bytes, model.at_host.weight_bytes, model.at_host.trained_share
        parameters -= gone
        gradients -= gone * share * model.gradients_per_parameter
        optimizer -= all_of_it * share * model.states_per_parameter / over
    return {"parameters": round(parameters), "gradients": round(gradients), "optimizer_state": round(optimizer)}


def _buckets(model: ModelParts, layout: Layout, states: dict[str, int]) -> int:
    """Buckets of DistributedDataParallel: the gradients a second time, as it has them by default."""
    is_reduced = layout.zero_stage < 2 and layout.dp * layout.cp > 1 and model.has_buckets
    return states["gradients"] if is_reduced else 0


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
