"""Puts `micro_batches` on live objects: see `tightfit.techniques.micro_batches.micro_batches` for what it is and where it comes from."""

import functools
from collections.abc import Callable, Sequence

import torch

from tightfit.errors import ApplyError, apply_errors_said, forget_apply_errors_since
from tightfit.techniques.lazy_tensors.asked_gradients import watch_inputs_of_backward
from tightfit.techniques.micro_batches.split_forward import WRAPPERS, SplitForward
from tightfit.techniques.micro_batches.split_step import split_step
from tightfit.techniques.session import Session, without_numbers
from tightfit.techniques.technique import ChosenOption, parse_bool, the_only
from tightfit.torch_hooks.backward import leaves_with_hooked_accumulators

_NAME = "micro_batches"


def apply_micro_batches(session: Session, chosen: Sequence[ChosenOption]) -> None:
    """Wraps the model's forward, or the loop's step."""
    choice = the_only(chosen)
    model, loop = session.model, choice.settings.get("loop")
    if loop and session.loop is None:
        raise ApplyError(
            f"this plan splits batches in the training loop of {loop}, which only tightfit run can do; "
            "leave micro_batches out"
        )
    if not (loop or session.optimizers):
        raise ApplyError("no optimizer of torch.optim holds the model's parameters; leave micro_batches out")
    for module in model.modules() if loop else (model,):
        if type(module).__name__ in WRAPPERS:
            raise ApplyError(
                f"the model is called through {type(module).__name__}, which would not be called for the parts of a "
                "batch; leave micro_batches out"
            )
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.training:
            raise ApplyError(
                f"{name} is a batch norm in training: its statistics are those of the whole batch; leave micro_batches out"
            )

    hooked = set(map(id, leaves_with_hooked_accumulators()))
    for name, parameter in model.named_parameters():
        if id(parameter) in hooked:
            raise ApplyError(
                f"the gradient accumulator of {name} has a hook, which would see each part's gradient instead of the "
                "batch's; leave micro_batches out"
            )

    statistics = session.statistics

    def counted() -> None:
        statistics["micro-batches"] += 1

    num_parts, may_draw = int(choice.settings["num_parts"]), parse_bool("draws_anew", choice.settings["draws_anew"])
    refuse = functools.partial(session.verdict.refuse, technique=_NAME)
    if loop:
        split_step(session, loop, num_parts, allows_randomness=may_draw, counted=counted, refuse=refuse)
        return

    verdict, notes, said_before = session.verdict, session.notes, set[str]()

    def takes_back() -> Callable[[str], None]:
        failure, said = verdict.failure, apply_errors_said()

        def take_back(why: str) -> None:
            verdict.failure = failure
            forget_apply_errors_since(said)
            note = f"micro_batches: a later batch ran whole: {why.removesuffix('; leave micro_batches out')}"
            if without_numbers(note) not in said_before:
                said_before.add(without_numbers(note))
                notes.append(note)

        return take_back

    split = SplitForward(
        model,
        num_parts,
        allows_randomness=may_draw,
        counted=counted,
        refuse=refuse,
        check_steps=session.check_steps,
        notes=session.notes,
        takes_back=takes_back,
    )
    session.wrap_forward(model, split)
    watch_inputs_of_backward(session)
