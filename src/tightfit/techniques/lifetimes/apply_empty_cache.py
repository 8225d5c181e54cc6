"""Puts `empty_cache` on live objects: see `tightfit.techniques.lifetimes.empty_cache` for what it is and where it comes from."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tightfit.errors import ApplyError
from tightfit.techniques.session import Session
from tightfit.techniques.technique import ChosenOption, the_only


def apply_empty_cache(session: Session, chosen: Sequence[ChosenOption]) -> None:
    """Registers optimizer hooks, or wraps the model's forward."""
    choice = the_only(chosen)
    border = choice.settings["border"]
    if border in ("before the optimizer", "after the optimizer"):
        if not session.optimizers:
            raise ApplyError("no optimizer of torch.optim holds the model's parameters; leave empty_cache out")
        for optimizer in session.optimizers:
            before = border == "before the optimizer"
            hook = optimizer.register_step_pre_hook if before else optimizer.register_step_post_hook
            session.hook(hook, _empty)
        return
    session.wrap_forward(session.model, _before if border == "before the forward" else _after)


def _empty(*_: Any) -> None:
    torch.cuda.empty_cache()


def _before(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # Forwards without gradients (evaluation, generation) come in long loops, and each call of cudaFree waits
    # for the card.
    if torch.is_grad_enabled():
        torch.cuda.empty_cache()
    return forward(*args, **kwargs)


def _after(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = forward(*args, **kwargs)
    if torch.is_grad_enabled():
        torch.cuda.empty_cache()
    return result
