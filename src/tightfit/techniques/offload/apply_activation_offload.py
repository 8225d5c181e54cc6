"""Puts `activation_offload` on live objects: see `tightfit.techniques.offload.activation_offload` for what it is and where it comes from."""

from collections.abc import Sequence

from tightfit.analysis.relative_places import following_of
from tightfit.techniques.session import Session
from tightfit.techniques.technique import ChosenOption, check_each
from tightfit.techniques.wrappers.far_tiers import by_tier, disk_space_for
from tightfit.techniques.wrappers.offloaded_calls import MovedCalls, engine_of, offload_calls, selection_of

_NAME = "activation_offload"
_LOST = "; this backward pass cannot be finished, and its gradients are incomplete"


def apply_activation_offload(session: Session, chosen: Sequence[ChosenOption]) -> None:
    """Wraps the forward of each block, and of each that follows one.

    Raises:
        ApplyError: a place is not there, the parameters are on several devices, the host has too little memory or the disk too little space.
    """
    moved = check_each(
        chosen,
        lambda choice: MovedCalls(
            module=session.module(choice.where), where=choice.where, selection=selection_of(choice.settings)
        ),
    )
    following = check_each(chosen, lambda choice: session.module(following_of(choice.where, choice.settings)))
    at_host, on_disk = by_tier(chosen)
    engine_of(
        session,
        sum(int(choice.settings["host_bytes"]) for choice in at_host),
        disk_space_for(session, on_disk, _NAME, "activations", _LOST),
    )
    offload_calls(session, _NAME, moved, following)
