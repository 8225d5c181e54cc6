"""Puts `sequential_checkpointing` on live objects: see `tightfit.techniques.recomputation.sequential_checkpointing` for what it is and where it comes from."""

from collections.abc import Sequence

import torch

from tightfit.techniques.recomputation.large_calls import LargeCalls, large_calls
from tightfit.techniques.recomputation.recompute import Recomputed
from tightfit.techniques.session import Session
from tightfit.techniques.technique import ChosenOption, check_each
from tightfit.techniques.wrappers.sequential_ranges import MakeRunner, Runner, check_sequential, put_range

_NAME = "sequential_checkpointing"


def apply_sequential_checkpointing(session: Session, chosen: Sequence[ChosenOption]) -> None:
    """Wraps each Sequential once, with code that runs its segments."""
    check_each(chosen, lambda c: check_sequential(session, c.where, c.settings["begin"], c.settings["end"]))
    for choice in chosen:
        begin, end = choice.settings["begin"], choice.settings["end"]
        calls = large_calls(session, _NAME, choice)
        put_range(session, choice.where, begin, end, _maker(session, choice.where, calls))


def _maker(session: Session, where: str, calls: LargeCalls) -> MakeRunner:
    """Makes a function that creates the runner of a segment; it refers to the session's verdict, and not to the session."""
    verdict, check_steps = session.verdict, session.check_steps

    def make(children: Sequence[torch.nn.Module]) -> Runner:
        # Past the registration of modules, which the program may have hooks on.
        chain = torch.nn.Sequential()
        chain._modules.update({str(i): child for i, child in enumerate(children)})
        around = Recomputed(chain, where=where, technique=_NAME, verdict=verdict, check_steps=check_steps)
        run = calls.only(around)
        return lambda value: run(chain.forward, value)

    return make
