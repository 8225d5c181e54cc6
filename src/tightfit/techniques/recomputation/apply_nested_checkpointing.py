"""Puts `nested_checkpointing` on live objects: see `tightfit.techniques.recomputation.nested_checkpointing` for what it is and where it comes from."""

from collections.abc import Sequence

import torch

from tightfit.errors import ApplyError
from tightfit.techniques.recomputation.large_calls import large_calls
from tightfit.techniques.recomputation.recompute import Recomputed
from tightfit.techniques.recomputation.recomputed_inputs import Segment
from tightfit.techniques.session import Session
from tightfit.techniques.technique import ChosenOption, check_each

_NAME = "nested_checkpointing"


def apply_nested_checkpointing(session: Session, chosen: Sequence[ChosenOption]) -> None:
    """Wraps the forward of each block of each segment."""
    segments = check_each(chosen, lambda choice: _modules(session, choice))
    for choice, modules in zip(chosen, segments, strict=True):
        around = [
            Recomputed(
                module,
                where=choice.where,
                technique=_NAME,
                verdict=session.verdict,
                check_steps=session.check_steps,
            )
            for module in modules
        ]
        segment = Segment(around)
        calls = large_calls(session, _NAME, choice)
        for number, module in enumerate(modules):
            session.wrap_forward(module, calls.only(segment.around(number)))


def _modules(session: Session, choice: ChosenOption) -> list[torch.nn.Module]:
    container = session.module(choice.where)
    begin, end = choice.settings["begin"], choice.settings["end"]
    if not 0 <= begin < end <= len(container._modules):
        raise ApplyError(f"{choice.where} has no children {begin} to {end - 1}; make a plan for this model")
    names = [str(number) for number in range(begin, end)]
    modules = [container._modules.get(name) for name in names]
    found = [module for module in modules if module is not None]
    if len(found) < len(names):
        raise ApplyError(f"{choice.where} has no children {names[0]} to {names[-1]}; make a plan for this model")
    for module in found:
        for name, part in module.named_modules():
            if getattr(part, "running_mean", None) is not None and part.training:
                raise ApplyError(
                    f"{choice.where} contains {name or 'itself'}, a {type(part).__name__} whose statistics a third run would change; use checkpointing there"
                )
    return found
