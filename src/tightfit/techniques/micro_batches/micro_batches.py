"""Micro-batches: the batch is run in parts, forward and backward, and the gradients are summed, inside one forward of the user's loop.

Gradient accumulation without changing the loop: for models that return their loss (Hugging Face's with labels, and any root that ends in a loss
function), and for the training loops of Lightning and the Trainer, which have a method that does, whatever their model returns.
The means of the parts are weighted by the number of their terms, so that the sum is the gradient of the whole batch.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, final

import numpy as np

from tightfit.analysis.gradient_readers import scales_loss
from tightfit.analysis.intervals import changes, memory_timeline
from tightfit.analysis.optimizer import OptimizerProfile, passes_of, sides_of_update
from tightfit.analysis.profile import Profile
from tightfit.analysis.recomputable import BATCH_NORMS
from tightfit.analysis.updates import BACKWARD_SLOT
from tightfit.cost.efficiency import efficiency_of
from tightfit.cost.host_python import HostWork
from tightfit.cost.roofline import is_kernel
from tightfit.planner.option import Change, Option, merged
from tightfit.planner.sides import Sides
from tightfit.planner.suggestion import Suggestion
from tightfit.tape import Category, Column, Phase, Tape
from tightfit.techniques.technique import AbstractTechnique, ChosenOption, Needs

if TYPE_CHECKING:
    from tightfit.techniques.session import Session

# Powers of two divide most batches evenly; a last part that is shorter is allowed, and another length means
# another proof.
NUMS_PARTS = (2, 4, 8)

_LOSSES = (
    *("aten.nll_loss_forward", "aten.nll_loss2d_forward", "aten.nll_loss", "aten.mse_loss", "aten.smooth_l1_loss"),
    *("aten.huber_loss", "aten.binary_cross_entropy", "aten.l1_loss"),
)


@final
class MicroBatches(AbstractTechnique):
    """Trades more and smaller kernels for all but one part of the activations."""

    name = "micro_batches"
    exact = True
    needs = Needs.DIVISIBLE
    exactness = "up to the order of the sum over the batch; where the model draws random numbers (dropout) these differ, and it is lossy"
    lossy_where = "the model draws random numbers"
    tolerance = 0.25

    def options(self, profile: Profile) -> Iterable[Option]:
        """Halves, quarters and eighths of the batch, if the model itself computes the loss, or a framework's loop has a method that does."""
        run = profile.optimizer
        if not run.step_ranges or _obstacle(run):
            return
        is_random = any(name in profile.tape.random_operators for name in _names_of_forward(profile.tape))
        loop = {"loop": profile.tape.loop} if _is_of_loop(run) else {}
        for num_parts in NUMS_PARTS:
            sides = _sides(run, num_parts)
            yield Option(
                technique=self.name,
                where="batch",
                settings={"num_parts": num_parts, "draws_anew": is_random, **loop},
                changes=_changes(run, num_parts),
                seconds=run.step.added(sides),
                sides=sides,
                exact=not is_random,
                # A part's backward pass runs inside the forward: no other technique may change what happens in
                # backward passes.
                slots=frozenset({"batch", BACKWARD_SLOT}),
                needs_new_trace=True,
                leaves_share=1 / num_parts,
            )

    def advice(self, profile: Profile) -> Iterable[Suggestion]:
        """Advice for the user's own loop if this technique cannot be applied."""
        run = profile.optimizer
        reason = _obstacle(run)
        if not (run.step_ranges and reason):
            return []
        saved = max((-c.num_bytes for c in _changes(run, 2)), default=0)
        if len(_operators(profile.tape, BATCH_NORMS)):
            what = f"half the batch, accumulated over two backward passes, would hold about half the activations, but is not the same training: {reason}"
            return [Suggestion(what=what, saves_bytes=saved, changes="batch", splits_batch=True)]
        what = (
            f"the batch cannot be split from outside, because {reason}; in the loop: half the batch, two backward passes per optimizer step, each "
            "loss divided by two (Trainer and Accelerate: gradient_accumulation_steps=2, Lightning: accumulate_grad_batches=2, each with half "
            "the batch size)"
        )
        return [Suggestion(what=what, saves_bytes=saved, splits_batch=True)]

    def apply(self, session: "Session", chosen: Sequence[ChosenOption]) -> None:
        """Wraps the model's forward, or the loop's step."""
        from tightfit.techniques.micro_batches.apply_micro_batches import apply_micro_batches

        apply_micro_batches(session, chosen)


def _operators(tape: Tape, names: tuple[str, ...]) -> Column:
    known = [i for i, text in enumerate(tape.strings) if text.startswith(names)]
    return np.flatnonzero(np.isin(tape.operators.name, known) & (tape.operators.phase == Phase.FORWARD))


def _names_of_forward(tape: Tape) -> Iterator[str]:
    is_forward = tape.operators.phase == Phase.FORWARD
    return (tape.strings[name] for name in np.unique(tape.operators.name[is_forward]).tolist())


def _obstacle(run: OptimizerProfile) -> str:
    """The reason against splitting the batch, as far as a tape shows; empty if there is none."""
    if len(_operators(run.tape, BATCH_NORMS)):
        return "a batch norm takes its statistics from the whole batch"
    if _is_of_loop(run):
        return ""
    if not _returns_loss(run.tape):
        return "its loss is computed outside of the model"
    return "a GradScaler scales it outside" if scales_loss(run) else ""


def _is_of_loop(run: OptimizerProfile) -> bool:
    """Whether the step of a framework can be split, and not the model. The Trainer's label smoother is no loss function of torch."""
    tape = run.tape
    has_step = tape.loop == "Trainer" or (tape.loop == "Lightning" and bool(len(_operators(tape, _LOSSES))))
    return has_step and (scales_loss(run) or not _returns_loss(tape))


def _returns_loss(tape: Tape) -> bool:
    """Whether the loss functions run inside of the model."""
    losses = _operators(tape, _LOSSES)
    roots = [root for root in _roots(tape, np.flatnonzero(tape.operators.phase == Phase.FORWARD)) if root]
    # A loss function that is a module of its own (torch.nn.CrossEntropyLoss) is called beside the model, not by it.
    model = max(set(roots), key=roots.count, default="")
    return bool(len(losses)) and set(_roots(tape, losses)) == {model}


def _roots(tape: Tape, operators: Column) -> list[str]:
    """The class of the outermost module that each of these operators ran in, empty outside of all."""
    return [tape.strings[m].partition(".")[0] for m in tape.operators.module[operators].tolist()]


def _changes(run: OptimizerProfile, num_parts: int) -> tuple[Change, ...]:
    """All but one part of the storages made in the passes are gone, but for autocast's copies of weights; the gradients are allocated from the first part on.

    Gradients that are added to in a pass are held beside those of its parts. Gradients of the previous step that are dropped between forward and backward pass stay allocated to the end of the pass, except in
    Lightning's steps, which drop them before.
    """
    drops = _is_of_loop(run) and run.tape.loop == "Lightning"
    storages = run.tape.storages
    by_operator = storages.operator >= 0
    phase = np.where(by_operator, run.tape.operators.phase[storages.operator], Phase.OTHER)
    made = np.isin(storages.category, (Category.ACTIVATIONS, Category.TEMPORARIES)) & np.isin(
        phase, (Phase.FORWARD, Phase.BACKWARD)
    )
    made[run.modules.lifetimes.casts[:, 0]] = False
    at = np.flatnonzero(made)
    gone = changes(memory_timeline(run.allocated_at[at], run.freed_at[at], run.block_bytes[at]), -(1 - 1 / num_parts))
    gradients = np.flatnonzero(storages.category == Category.GRADIENTS)
    cached = _held_through(run)
    early: list[Change] = []
    for begin, end in passes_of(run):
        new = gradients[(run.allocated_at[gradients] >= begin) & (run.allocated_at[gradients] < end)]
        early += changes(memory_timeline(np.full(len(new), begin), run.allocated_at[new], run.block_bytes[new]))
        # A part's own is there until it is added to those of the parts before.
        at = np.sort(run.allocated_at[new])
        added = np.append(at[1:], end)[np.searchsorted(at, run.allocated_at[new])]
        early += changes(memory_timeline(run.allocated_at[new], added, run.block_bytes[new]))
        old = gradients[
            (run.allocated_at[gradients] < begin) & (run.freed_at[gradients] > begin) & (run.freed_at[gradients] < end)
        ]
        held = memory_timeline(np.full(len(old), begin), run.freed_at[old], -run.block_bytes[old])
        early += changes(
            held if drops else memory_timeline(run.freed_at[old], np.full(len(old), end), run.block_bytes[old])
        )
        kept = gradients[(run.allocated_at[gradients] < begin) & (run.freed_at[gradients] >= end)]
        # Put aside while the parts make theirs, which the program's own backward pass adds to them.
        early += changes(memory_timeline(np.full(len(kept), begin), np.full(len(kept), end), run.block_bytes[kept]))
        copies = cached[(run.allocated_at[cached] >= begin) & (run.allocated_at[cached] < end)]
        early += changes(
            memory_timeline(np.full(len(copies), begin), run.allocated_at[copies], run.block_bytes[copies])
        )
        late = np.minimum(run.freed_at[copies], end)
        early += changes(memory_timeline(late, np.full(len(copies), end), run.block_bytes[copies]))
    return merged((*gone, *early))


def _held_through(run: OptimizerProfile) -> Column:
    """Autocast's copies of weights whose context is around the model: the backward passes of all parts then run within it."""
    storages, rows = run.modules.lifetimes.casts.T
    return storages[~run.tape.casts.is_of_module[rows]] if not _is_of_loop(run) else storages[:0]


def _sides(run: OptimizerProfile, num_parts: int) -> Sides:
    """The extra time of more and smaller kernels: the fixed cost of each, once per part, and the traffic of the sums of gradients."""
    working, phase = is_kernel(run.tape), run.tape.operators.phase
    in_passes = int((working & np.isin(phase, (Phase.FORWARD, Phase.BACKWARD))).sum()) / run.num_steps
    gradients = run.gradients(run.step_ranges[-1])
    total = int(run.block_bytes[gradients].sum())
    efficiency = efficiency_of(run.device)
    more = (num_parts - 1) * (in_passes + len(gradients))
    sums = sides_of_update(run, (3 * (num_parts - 1) + 2) * total, 0)
    # A product of few rows does not fill a card.
    num_products = int((run.is_product & np.isin(phase, (Phase.FORWARD, Phase.BACKWARD))).sum()) / run.num_steps
    ramps = (num_parts - 1) * num_products * efficiency.ramp_seconds
    # Of each forward pass of a step that accumulates.
    of_module = HostWork.MICRO_BATCHED_MODULE.value + num_parts * HostWork.MODULE_IN_PART.value
    in_python = len(run.modules.paths) * of_module * max(1.0, run.modules.num_rounds / run.num_steps)
    return sums + Sides(
        on_card=more * efficiency.launch_seconds + ramps, on_host=more * efficiency.issue_seconds + in_python
    )
