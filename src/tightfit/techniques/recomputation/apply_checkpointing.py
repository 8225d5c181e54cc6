"""Puts `checkpointing` on live objects: see `tightfit.techniques.recomputation.checkpointing` for what it is and where it comes from."""

from collections.abc import Sequence

from tightfit.techniques.recomputation.large_calls import large_calls
from tightfit.techniques.recomputation.recompute import Recomputed
from tightfit.techniques.session import Session
from tightfit.techniques.technique import ChosenOption, check_each

_NAME = "checkpointing"


def apply_checkpointing(session: Session, chosen: Sequence[ChosenOption]) -> None:
    """Wraps the forward of each block."""
    modules = check_each(chosen, lambda choice: session.module(choice.where))
    for choice, module in zip(chosen, modules, strict=True):
        around = Recomputed(
            module,
            where=choice.where,
            technique=_NAME,
            verdict=session.verdict,
            check_steps=session.check_steps,
        )
        session.wrap_forward(module, large_calls(session, _NAME, choice).only(around))
