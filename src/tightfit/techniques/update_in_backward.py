"""Each parameter is updated as soon as its gradient is there, and the gradient freed: they are never all alive at once.

Lv et al., "Full parameter fine-tuning for large language models with limited resources" (LOMO, arXiv:2306.09782); the hook is torch's
`register_post_accumulate_grad_hook`. Clipping by the norm of all gradients needs that norm before the first update: then the backward pass runs
twice, as in that paper, the first time for the norm alone.
"""

from collections.abc import Iterable, Sequence
from typing import final

import numpy as np

from tightfit.devices.device import Device
from tightfit.planner.option import Advice, Change, Option
from tightfit.tape import Category, Phase, Tape
from tightfit.techniques.optimizer_kernel import seconds_of_fused
from tightfit.techniques.optimizer_kernels import check_kernel, set_kernel
from tightfit.techniques.optimizer_steps import check_separable
from tightfit.techniques.optimizer_tape import OptimizerTape, Stretch, changes, levels, runs_of
from tightfit.techniques.session import Session
from tightfit.techniques.technique import AbstractTechnique, Choice
from tightfit.techniques.updates import Clipping, Updates

# What `torch.nn.utils.clip_grad_norm_` does, in both of its implementations.
_NORMS = frozenset({"_foreach_norm", "linalg_vector_norm", "norm"})
_SCALING = frozenset({"_foreach_mul_", "mul_"})


@final
class UpdateInBackward(AbstractTechnique):
    """Trades kernel launches (all tensors are updated one by one), and with clipping a second backward pass, for the gradients."""

    name = "update_in_backward"
    exact = True
    exactness = (
        "bit for bit: the same update of every parameter from the same gradient; with the fused kernel, or where gradients are clipped, "
        "up to rounding and the order in which the norm is summed"
    )
    tolerance = 0.15

    def options(self, tape: Tape, device: Device) -> Iterable[Option]:
        """With the implementation of the optimizer that runs, and with the fused one; where gradients are clipped, in two passes."""
        run = OptimizerTape(tape, device)
        if _obstacle(run) or not run.stretches:
            return []
        clips = bool(run.looks_at_gradients)
        longer = _waiting_for_norm(run) if clips else ()
        kernels = ["same", *(["fused"] if run.family != "other" and run.implementation != "fused" else [])]
        again = _backward_seconds(run) if clips else 0.0
        return [
            Option(
                technique=self.name,
                where="optimizer",
                settings={"kernel": kernel, "clips": clips},
                changes=(*_changes(run, kernel), *longer),
                seconds=_update_seconds(run, kernel) - run.seconds + again,
                exact=self.exact,
                slots=frozenset({"optimizer"}),
            )
            for kernel in kernels
        ]

    def advice(self, tape: Tape, device: Device) -> Iterable[Advice]:
        """What keeps gradients from being freed as they come."""
        run = OptimizerTape(tape, device)
        reason = _obstacle(run)
        if not run.stretches or not reason:
            return []
        held = int(run.block_bytes[run.gradients(run.stretches[-1])].sum())
        what = f"gradients cannot be used up within the backward pass, because {reason}"
        return [Advice(technique=self.name, what=what, saves_bytes=held, is_exact=True)]

    def apply(self, session: Session, chosen: Sequence[Choice]) -> None:
        """Hooks every parameter that an optimizer holds."""
        (choice,) = chosen
        for optimizer in session.optimizers:
            check_separable(optimizer, self.name)
            if choice.settings["kernel"] == "fused":
                check_kernel(optimizer, session.model, "fused")
        clipping = Clipping(session) if choice.settings["clips"] in (True, "True") else None
        for optimizer in session.optimizers:
            if choice.settings["kernel"] == "fused":
                set_kernel(session, optimizer, "fused")
            Updates(session, optimizer, clipping).install()


def _obstacle(run: OptimizerTape) -> str:
    """Why it cannot be done, as far as a tape shows; empty where it can."""
    if run.scales_loss:
        return "a GradScaler looks at all of them before it lets the optimizer step; bfloat16 needs none"
    if run.num_backwards_per_update > 1:
        return f"they are accumulated over {run.num_backwards_per_update} backward passes; a larger batch that is split otherwise needs none"
    looks = run.looks_at_gradients
    if looks and not (looks & _NORMS and looks <= _NORMS | _SCALING):
        return f"the script reads them before the optimizer steps ({', '.join(sorted(looks))})"
    return ""


def _update_seconds(run: OptimizerTape, kernel: str) -> float:
    """What the updates take per step of the loop when every tensor has its own kernels."""
    total = 0.0
    for stretch in run.steady:
        num_tensors = len(run.gradients(stretch))
        if kernel == "fused" or run.implementation == "fused":
            total += seconds_of_fused(run, stretch, num_kernels=2 * num_tensors)
        else:
            kernels = sum(num_tensors if "_foreach_" in name else 1 for name in run.names(stretch))
            total += run.seconds_of_kernels(stretch, kernels)
    return total


def _backward_seconds(run: OptimizerTape) -> float:
    stretches = runs_of(run.tape.operators.phase == Phase.BACKWARD)
    return sum(run.seconds_of(begin, end) for begin, end in stretches) / run.num_steps


def _changes(run: OptimizerTape, kernel: str) -> tuple[Change, ...]:
    """Gradients die once the next but one is there, states are born with them, and the optimizer's step holds nothing."""
    found: list[Change] = []
    seen: set[int] = set()
    for index, stretch in enumerate(run.stretches):
        gradients = run.gradients(stretch)
        gradients = gradients[np.argsort(run.born[gradients])]
        used = np.r_[run.born[gradients][2:], [stretch.begin_event] * 2][: len(gradients)]
        fresh = np.array([g not in seen for g in gradients.tolist()], dtype=bool)
        seen.update(gradients.tolist())
        found += changes(levels(used[fresh], run.died[gradients][fresh], run.block_bytes[gradients][fresh]), -1.0)
        held = run.held(stretch)
        found += changes(held, -1.0)
        if held and kernel == "same":
            largest = int(run.block_bytes[gradients].max(initial=0))
            found.append(Change(begin=int(run.born[gradients[0]]), end=stretch.begin_event, num_bytes=largest))
        if index == 0:
            found += _states_come_early(run, stretch)
    return tuple(change for change in found if change.end > change.begin)


def _states_come_early(run: OptimizerTape, stretch: Stretch) -> tuple[Change, ...]:
    """In the first step a parameter's states are made when its gradient is there."""
    gradients = run.gradients(stretch)
    state = run.state(stretch)
    state = state[run.born[state] >= stretch.begin_event]
    total, gradient_bytes = int(run.block_bytes[state].sum()), run.block_bytes[gradients]
    if not total or not gradient_bytes.sum():
        return ()
    share = gradient_bytes * (total / int(gradient_bytes.sum()))
    until_step = np.full(len(gradients), stretch.begin_event)
    early = changes(levels(run.born[gradients], until_step, share.astype(np.int64)))
    born, end = run.born[state], int(run.born[state].max())
    late = levels(np.full(len(state), stretch.begin_event), np.minimum(born, end), run.block_bytes[state])
    return (*early, *changes(late))


def _waiting_for_norm(run: OptimizerTape) -> tuple[Change, ...]:
    """What the backward pass frees as it goes is still needed by the second one while the first one runs."""
    anatomy_events = run.events_of(runs_of(run.tape.operators.phase == Phase.BACKWARD))
    activation = run.tape.storages.category == Category.ACTIVATIONS
    found: list[Change] = []
    for begin, end in anatomy_events:
        freed = np.flatnonzero(activation & (run.born < begin) & (run.died > begin) & (run.died < end))
        found += changes(levels(run.died[freed], np.full(len(freed), end), run.block_bytes[freed]))
    return tuple(found)
