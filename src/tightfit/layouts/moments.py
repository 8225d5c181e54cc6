"""What comes and goes in a step of one rank, at the moments at which its memory can be most.

loss        all activations, and what the part after the blocks keeps and needs
first back  all activations, and the working memory of a block, with what its recomputation makes again
last back   all gradients, the activations of the first block, and its working memory
update      all gradients, and the update's temporaries

FSDP2 keeps its root group (all that is in no block) gathered from the forward to the end of the backward pass. Gathered weights arrive in a buffer of a stream of their own, and so
do sharded gradients: PyTorch's allocator has memory by stream, so what these take stays theirs.
"""

import dataclasses

from tightfit.layouts.layout import Layout
from tightfit.layouts.model.model_parts import ModelPart, ModelParts
from tightfit.layouts.stages import Stage


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Bytes at one moment; `gradients` is the share of the rank's own gradients that is there, `is_of_tokens` says whether activations are most of what comes and goes."""

    gradients: float
    is_of_tokens: bool = True
    activations: float = 0.0
    working: float = 0.0
    gathered: float = 0.0

    def total(self, gradient_bytes: float) -> float:
        """All of it, with gradients of `gradient_bytes`."""
        return self.gradients * gradient_bytes + self.activations + self.working + self.gathered


def stored_bytes(model: ModelParts, layout: Layout, part: ModelPart, tied_bytes: int = 0) -> tuple[float, float]:
    """The bytes of the weights of a part on a rank before they are sharded: those of experts, and the others, without `tied_bytes` that another part has."""
    dense = part.parameter_bytes - part.expert_bytes - tied_bytes
    return (
        part.expert_bytes / layout.tp / layout.ep * model.stored_per_parameter,
        dense / layout.tp * model.stored_per_parameter,
    )


def moments(model: ModelParts, layout: Layout, stage: Stage, share: float) -> tuple[Moment, ...]:
    """The moments of a rank of `stage`, each of whose micro-batches has `share` of the traced one's tokens."""
    tp = layout.tp
    of_blocks, working, first = _blocks(model, layout, stage, share)
    early = (model.before.saved_bytes * share / tp if stage.has_before else 0.0) + _converted(model, layout, stage)
    activations = (of_blocks + early) * stage.in_flight
    after = model.after if stage.has_after else None
    # Each micro-batch but the first finds the gradients of those before it; sharded ones have memory of their own.
    is_first = layout.accumulation == 1 and not layout.is_gathered
    early_gradients = model.early_gradients if is_first else 1.0
    weights = _Weights(model, layout, stage)
    found = [
        Moment(gradients=early_gradients, activations=activations, working=working, gathered=weights.at_blocks),
        Moment(
            gradients=1.0,
            is_of_tokens=False,
            activations=(of_blocks + early) * (stage.in_flight - 1) + early + first[0],
            working=max(first[1], _working(model.before, share, tp) if stage.has_before else 0.0),
            gathered=weights.at_end,
        ),
        Moment(gradients=1.0, is_of_tokens=False, working=_update(model, layout, stage), gathered=weights.kept),
    ]
    if after is not None:
        of_loss = after.saved_bytes * share / tp + _working(after, share, tp)
        found.append(
            Moment(gradients=early_gradients, activations=activations, working=of_loss, gathered=weights.at_loss)
        )
    return tuple(found)


class _Weights:
    """What FSDP holds of weights and gradients besides shards, at each moment."""

    def __init__(self, model: ModelParts, layout: Layout, stage: Stage) -> None:
        self.kept = self.at_loss = self.at_blocks = self.at_end = 0.0
        if not layout.is_gathered:
            return
        gathered = model.gathered_per_parameter
        blocks, root = [], 0.0
        for i, part, count in stage.parts(model):
            whole = sum(stored_bytes(model, layout, part)) * gathered
            if 0 < i <= len(model.blocks):
                blocks += [whole] * count
            else:
                root += whole
        tied = stage.tied_bytes(model) * model.stored_per_parameter * gathered / layout.tp
        root -= tied
        after = sum(stored_bytes(model, layout, model.after)) * gathered if stage.has_after else 0.0
        block = max(blocks, default=0.0)
        # Two blocks at once: the one that computes, and the one that is gathered for it to be followed by.
        unsharded = sum(blocks) if layout.zero_stage == 2 else min(len(blocks), 2) * block
        self.kept = max(root, min(len(blocks), 2) * block)
        self.at_loss = self.kept + root + (unsharded if layout.zero_stage == 2 else block)
        reduced = 1 + model.reduced_per_gathered
        self.at_blocks = self.kept + root + unsharded + after + block * reduced
        self.at_end = self.kept + root + (unsharded if layout.zero_stage == 2 else block) + root * reduced


def _blocks(model: ModelParts, layout: Layout, stage: Stage, share: float) -> tuple[float, float, tuple[float, float]]:
    """What the blocks of a stage save for backward, the largest working memory of one, and both of the first."""
    saved, largest, left, tp = 0.0, 0.0, layout.num_recomputed, layout.tp
    first: tuple[float, float] | None = None
    for i, part, count in stage.parts(model):
        if not 0 < i <= len(model.blocks):
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
        saved += ((count - again) * plain + again * kept) * share
        working = _working(part, share, tp) + (plain - kept if again else 0.0) * share
        largest = max(largest, working)
        first = first or ((kept if again else plain) * share, working)
    return saved, largest, first or (0.0, 0.0)


def _working(part: ModelPart, share: float, tp: int) -> float:
    return (part.working_bytes * share + part.fixed_working_bytes) / tp


def _converted(model: ModelParts, layout: Layout, stage: Stage) -> float:
    """Copies of the weights in the type that is computed with, which autocast makes and each micro-batch saves; FSDP gathers the weights converted."""
    if layout.is_gathered or model.gathered_per_parameter == 1.0:
        return 0.0
    return sum(n * part.converted_bytes for _, part, n in stage.parts(model)) / layout.tp


def _update(model: ModelParts, layout: Layout, stage: Stage) -> float:
    """Temporaries of the update, in proportion to the weights that the rank updates."""
    own = sum(n * part.parameter_bytes for _, part, n in stage.parts(model)) - stage.tied_bytes(model)
    if layout.streams_weights and model.at_host is not None:
        # The host updates what it has.
        own -= model.at_host.weight_bytes * model.at_host.trained_share
    over = layout.sharded_over if layout.zero_stage >= 1 else 1
    return model.optimizer_bytes * own / max(1, model.parameter_bytes) / layout.tp / over
