"""Puts `low_bit_offload` on live objects: see `tightfit.techniques.precision.low_bit_offload` for what it is and where it comes from."""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from tightfit.engine.host_slab import unregister_gone
from tightfit.engine.slab_notes import notes_on
from tightfit.errors import ApplyError
from tightfit.techniques.optimizer.apply_optimizer_offload import device_of_optimizers
from tightfit.techniques.optimizer.at_host.host_codec import HostCodec
from tightfit.techniques.optimizer.states.quantized_states import EncodedStates, encode_now, encode_states
from tightfit.techniques.optimizer.states.state_codecs import AbstractCodec, BlockCodec
from tightfit.techniques.optimizer.updates.optimizer_steps import update_within_step
from tightfit.techniques.precision.apply_pure_bf16 import lower_model
from tightfit.techniques.precision.coded_host_codec import CodedHostCodec, RoundedCodec
from tightfit.techniques.precision.master_residual import RESIDUAL, MasterCodec, MasterUpdate
from tightfit.techniques.session import Session
from tightfit.techniques.technique import ChosenOption, the_only

_NAME = "low_bit_offload"
_FORMATS = ("8-bit", "bf16")


def apply_low_bit_offload(session: Session, chosen: Sequence[ChosenOption]) -> None:
    """Replaces the optimizers' steps.

    Raises:
        ApplyError: the parameters are on several devices, the host has too little memory, an optimizer cannot be stepped parameter by parameter, or the model
            cannot be in bfloat16.
    """
    choice = the_only(chosen)
    kept, master = choice.settings.get("format"), choice.settings.get("master", "")
    if kept not in _FORMATS or master not in ("", "residual") or (master and kept != "8-bit"):
        raise ApplyError(
            f"format={kept!r} with master={master!r} is not known; formats are {', '.join(_FORMATS)}, master is residual, with 8-bit"
        )
    device = device_of_optimizers(session)
    host = HostCodec(device, int(choice.settings["host_bytes"]))
    # Undone last, when no state is at the host any more.
    session.when_undone(unregister_gone)
    session.notes.extend(notes_on(device, [host.slab], "optimizer states"))
    inner: AbstractCodec = BlockCodec(8) if kept == "8-bit" else RoundedCodec()
    window = int(choice.settings["window_bytes"])
    if not master:
        encode_states(session, CodedHostCodec(inner, host), _NAME, choice.settings, window_bytes=window)
        return
    session.when_undone(functools.partial(_drop_residuals, list(session.optimizers)))
    updates: dict[torch.optim.Optimizer, MasterUpdate] = {}

    def update_of(optimizer: torch.optim.Optimizer) -> MasterUpdate:
        updates[optimizer] = MasterUpdate(optimizer)
        return updates[optimizer]

    lower_model(session, _NAME, update_of)
    codec = CodedHostCodec(MasterCodec(inner), host)
    refuse = functools.partial(session.verdict.refuse, technique=_NAME)
    for optimizer, update in updates.items():
        encoded = EncodedStates(optimizer, codec, window, refuse, update_one=update.update_one)
        encode_now(session, optimizer, encoded)
        session.hook(functools.partial(optimizer.register_state_dict_post_hook, prepend=True), _without_residuals)
        update_within_step(session, optimizer, encoded)


def _drop_residuals(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        for state in optimizer.state.values():
            if isinstance(state, dict):
                state.pop(RESIDUAL, None)


def _without_residuals(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint as a plain run's: with the rest of each weight cut off, as its model's is."""
    states = {
        index: {name: value for name, value in state.items() if name != RESIDUAL} if isinstance(state, dict) else state
        for index, state in state_dict["state"].items()
        # Of an optimizer without states (SGD's) there is nothing else.
        if not isinstance(state, dict) or set(state) != {RESIDUAL}
    }
    return {**state_dict, "state": states}
