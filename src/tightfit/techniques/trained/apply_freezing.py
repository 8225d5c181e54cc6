"""Puts `freezing` on live objects: see `tightfit.techniques.trained.freezing` for what it is and where it comes from."""

from collections.abc import Sequence

import torch

from tightfit.errors import ApplyError
from tightfit.techniques.session import Session
from tightfit.techniques.technique import ChosenOption, the_only
from tightfit.techniques.wrappers.reduced_gradients import ReducedGradients


def apply_freezing(session: Session, chosen: Sequence[ChosenOption]) -> None:
    """Takes the parameters out of the graph; an optimizer skips parameters without a gradient."""
    choice = the_only(chosen)
    before = [name for name in str(choice.settings["before"]).split(",") if name]
    names = [f"{choice.where}.{i}" for i in range(int(choice.settings["num_blocks"]))]
    # What contains the blocks works before them too, with parameters of its own: the token and the positions of a vision transformer.
    held = [p for name in before for p in session.module(name).parameters(recurse=False)]
    held += [p for name in names for p in session.module(name).parameters()]
    frozen = {id(p): p for p in held if p.requires_grad}
    if not frozen:
        raise ApplyError("none of the first blocks is trained anyway; leave freezing out")
    if all(id(p) in frozen for p in session.model.parameters() if p.requires_grad):
        raise ApplyError("all trained parameters would be frozen; leave freezing out")
    # An optimizer would go on applying a gradient that no backward pass replaces.
    if any(p.grad is not None for p in frozen.values()):
        raise ApplyError(
            "parameters that would be frozen have gradients already; freeze before the first backward pass"
        )
    # It averages no gradient of a bucket before all of it are there.
    if ReducedGradients().is_any_of(list(frozen.values())):
        raise ApplyError(
            "DistributedDataParallel wrapped the model before the plan was applied, and waits for gradients of "
            "parameters that would be frozen; wrap it afterwards, or leave freezing out"
        )
    for parameter in frozen.values():
        parameter.requires_grad_(False)
    session.notes.append(
        f"freezing: {sum(p.numel() for p in frozen.values()):,} parameters are not trained ({names[0]} to "
        f"{names[-1]}, and the modules that run before them)"
    )
    session.when_undone(lambda: _thaw(list(frozen.values())))


def _thaw(parameters: Sequence[torch.Tensor]) -> None:
    for parameter in parameters:
        parameter.requires_grad_(True)
