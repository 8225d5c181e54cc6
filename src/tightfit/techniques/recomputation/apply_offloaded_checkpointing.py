"""Puts `offloaded_checkpointing` on live objects: see `tightfit.techniques.recomputation.offloaded_checkpointing` for what it is and where it comes from."""

import functools
from collections.abc import Sequence

from tightfit.analysis.relative_places import following_of
from tightfit.engine.saved.saved_tensors import SavedTensors
from tightfit.techniques.recomputation.held_products import held_contexts
from tightfit.techniques.recomputation.recompute import Recomputed
from tightfit.techniques.session import Session
from tightfit.techniques.technique import ChosenOption, check_each
from tightfit.techniques.wrappers.offloaded_calls import MovedCalls, engine_of, offload_calls, selection_of

_NAME = "offloaded_checkpointing"


def apply_offloaded_checkpointing(session: Session, chosen: Sequence[ChosenOption]) -> None:
    """Wraps the forward of each block, and of each that follows one.

    Raises:
        ApplyError: a place is not there, the parameters are on several devices, or the host has too little memory.
    """

    following = check_each(chosen, lambda choice: session.module(following_of(choice.where, choice.settings)))
    check_each(chosen, lambda choice: session.module(choice.where))
    engine = engine_of(session, sum(int(choice.settings["host_bytes"]) for choice in chosen))
    # A checkpoint saves its arguments where it begins, outside of its own hooks: those are what moves, and what it keeps of its products.
    moved = [
        MovedCalls(
            module=session.module(choice.where),
            where=choice.where,
            selection=selection_of(choice.settings),
            inside=_recomputed(session, choice, engine),
        )
        for choice in chosen
    ]
    offload_calls(session, _NAME, moved, following)


def _recomputed(session: Session, choice: ChosenOption, engine: SavedTensors) -> Recomputed:
    keep = frozenset(choice.settings.get("keep", ()))
    return Recomputed(
        session.module(choice.where),
        where=choice.where,
        technique=_NAME,
        verdict=session.verdict,
        check_steps=session.check_steps,
        contexts=functools.partial(held_contexts, engine, keep) if keep else None,
    )
