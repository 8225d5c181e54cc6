"""Puts `chunked_loss` on live objects: see `tightfit.techniques.loss_head.chunked_loss` for what it is and where it comes from."""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tightfit.effects.ambient import modes_of_program
from tightfit.effects.bytecode.class_questions import ClassQuestion
from tightfit.effects.users_code import is_users_function
from tightfit.effects.values.value_checks import has_values
from tightfit.errors import ApplyError
from tightfit.techniques.lazy_tensors.asked_gradients import watch_inputs_of_backward
from tightfit.techniques.lazy_tensors.data_of_stand_ins import refuse_data_of_stand_ins
from tightfit.techniques.loss_head.deferred_logits import Chunks, Origin, WeightCopies, deferred_logits
from tightfit.techniques.session import Session
from tightfit.techniques.technique import ChosenOption, check_each
from tightfit.techniques.wrappers.first_order import Refuse, are_transforms_active
from tightfit.techniques.wrappers.traced_calls import is_looked_at
from tightfit.torch_hooks.saved_tensor_hooks import packs_by_itself
from tightfit.torch_hooks.weak_references import WeakTable

_NAME = "chunked_loss"


def apply_chunked_loss(session: Session, chosen: Sequence[ChosenOption]) -> None:
    """Wraps the head's `forward`, and registers hooks on optimizers that change its weight."""

    def check(choice: ChosenOption) -> torch.nn.Module:
        head = session.module(choice.where)
        if type(head).forward is not torch.nn.Linear.forward or is_users_function(torch.nn.Linear.forward):
            raise ApplyError(
                f"the head {choice.where} is a {type(head).__name__}, and chunked_loss needs a torch.nn.Linear; leave it out"
            )
        if not has_plain_weight(head):
            raise ApplyError(
                f"the weight of the head {choice.where} is computed from other tensors (a parametrization such as "
                "spectral_norm), and chunked_loss needs a plain parameter; leave it out"
            )
        return head

    heads = check_each(chosen, check)
    origins: WeakTable[Origin, None] = WeakTable()
    question = ClassQuestion(session.model)
    for choice, head in zip(chosen, heads, strict=True):
        settings = choice.settings
        chunks = Chunks(num_chunks=settings["num_chunks"], gradients_in=settings["gradients_in"])
        refuse = functools.partial(session.verdict.refuse, technique=_NAME, places=(choice.where,))
        deferral = _Deferral(
            chunks, origins, functools.partial(_count, session.statistics), refuse, session.check_steps, question
        )
        session.wrap_forward(head, deferral)

    # One hook for all heads, so that a weight that two heads share is copied once (`WeightCopies`). A step that is compiled would be guarded by what
    # is in the table now.
    @torch._disable_dynamo
    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        copies = WeightCopies()
        for origin in list(origins):
            if any(origin.parameter is p for group in optimizer.param_groups for p in group["params"]):
                origin.before_weight_changes(copies)

    for optimizer in session.optimizers:
        session.hook(optimizer.register_step_pre_hook, before_step)
    watch_inputs_of_backward(session)
    session.when_undone(refuse_data_of_stand_ins())


class _Deferral:
    """The wrapper around the head's `forward`."""

    def __init__(
        self,
        chunks: Chunks,
        origins: WeakTable[Origin, None],
        counted: Callable[[str], None],
        refuse: Refuse,
        check_steps: int,
        question: ClassQuestion,
    ) -> None:
        self.chunks = chunks
        self.origins = origins
        self.counted = counted
        self.refuse = refuse
        self.checks_left = check_steps
        self.question = question

    def __call__(self, forward: Callable[..., torch.Tensor], /, *args: Any, **kwargs: Any) -> torch.Tensor:
        linear = _linear_of(forward)
        if are_transforms_active() or linear is None or kwargs or len(args) != 1:
            return forward(*args, **kwargs)
        if packs_by_itself() or modes_of_program() or is_looked_at(args, linear.weight):
            return forward(*args, **kwargs)
        # A linear function that the program has put in the place of torch's is to be called.
        if not has_plain_weight(linear) or not _can_wait(linear, args[0]) or is_users_function(functional.linear):
            return forward(*args, **kwargs)
        if line := self.question.line():
            raise self.refuse(
                f"{line} compares a tensor's type with torch.Tensor (type(...) is ...), and logits that are not "
                "materialised are a subclass; use isinstance, or plan without it: tightfit plan --without "
                "chunked_loss"
            )
        for earlier in self.origins:
            if earlier.parameter is linear.weight:
                earlier.when_called_again()
        is_checked = self.checks_left > 0 and has_values(args[0], linear.weight)
        self.checks_left -= is_checked
        origin = Origin(linear, args[0], self.chunks, self.counted, self.refuse, is_checked=is_checked)
        self.origins[origin] = None
        return deferred_logits(origin)


def _linear_of(forward: Callable[..., Any]) -> torch.nn.Linear | None:
    """The module whose own `forward` this is; None if that is wrapped by something else."""
    if (
        isinstance(forward, functools.partial)
        and forward.func is torch.nn.Linear.forward
        and not is_users_function(forward.func)
    ):
        return forward.args[0]
    return None


def has_plain_weight(linear: torch.nn.Module) -> bool:
    """Whether the weight and the bias are parameters, and not computed by a parametrization or set by a hook."""
    return linear._parameters.get("weight") is not None and "bias" in linear._parameters


def _can_wait(linear: torch.nn.Linear, hidden: torch.Tensor) -> bool:
    # Evaluation and generation read the logits themselves.
    wants_gradients = linear.training and torch.is_grad_enabled()
    # Sharded and quantised weights are more than their values.
    is_plain = not any(is_traceable_wrapper_subclass(p) for p in (hidden, linear.weight))
    is_double = torch.is_autocast_enabled(hidden.device.type) and torch.float64 in (hidden.dtype, linear.weight.dtype)
    return wants_gradients and is_plain and not is_double and hidden.dim() > 1 and not torch.compiler.is_compiling()


def _count(statistics: Counter[str], what: str) -> None:
    statistics[what] += 1
