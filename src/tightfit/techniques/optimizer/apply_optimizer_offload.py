"""Puts `optimizer_offload` on live objects: see `tightfit.techniques.optimizer.optimizer_offload` for what it is and where it comes from."""

from collections.abc import Sequence

import torch

from tightfit.effects.state import devices_of
from tightfit.engine.descriptors import close_gone
from tightfit.engine.host_slab import HostSlab, unregister_gone
from tightfit.engine.slab_notes import notes_on
from tightfit.errors import ApplyError
from tightfit.techniques.optimizer.at_host.host_codec import HostCodec
from tightfit.techniques.optimizer.at_host.host_updates import HostUpdates
from tightfit.techniques.optimizer.states.quantized_states import encode_states
from tightfit.techniques.optimizer.states.state_sizes import LOST_STATES, MIN_NUMBERS
from tightfit.techniques.optimizer.updates.optimizer_kernels import UPDATED_ON_HOST
from tightfit.techniques.optimizer.updates.update_settings import UpdateSettings
from tightfit.techniques.session import Session
from tightfit.techniques.technique import ChosenOption, the_only
from tightfit.techniques.wrappers.far_tiers import by_tier, disk_space_for

_NAME = "optimizer_offload"


def apply_optimizer_offload(session: Session, chosen: Sequence[ChosenOption]) -> None:
    """Replaces the optimizers' steps.

    Raises:
        ApplyError: the parameters are on several devices, the host has too little memory or the disk too little space, or an optimizer cannot be stepped parameter by
            parameter.
    """
    choice = the_only(chosen)
    device = device_of_optimizers(session)
    on_host = choice.settings.get("executor", "card") == "host"
    if on_host:
        _check_updates_on_host(session, choice)
    least = int(choice.settings.get("least_elements", MIN_NUMBERS))
    _, on_disk = by_tier(chosen)
    disk = disk_space_for(session, on_disk, _NAME, "optimizer states", LOST_STATES)
    codec = HostCodec(device, int(choice.settings["host_bytes"]), least_elements=least, disk=disk)
    slab = codec.slab
    # Undone last, when no state is at the host or on disk any more.
    session.when_undone(unregister_gone)
    session.when_undone(close_gone)
    # Plans of before have no window: nothing is brought ahead.
    window = choice.settings.get("window_bytes")
    encode_states(
        session,
        codec,
        _NAME,
        choice.settings,
        window_bytes=None if window is None else int(window),
        elsewhere=(lambda optimizer: HostUpdates(optimizer, slab, codec.copies))
        if isinstance(slab, HostSlab) and on_host
        else None,
    )
    session.notes.extend(notes_on(device, [slab], "optimizer states"))


def device_of_optimizers(session: Session) -> torch.device:
    """The device of all parameters that the optimizers update.

    Raises:
        ApplyError: there are several, or no optimizer has weights of the model.
    """
    if not session.optimizers:
        raise ApplyError(
            "no optimizer holds weights of the model at its first call (the optimizer is created later, or "
            "torch.func.functional_call calls the model with other weights); leave states at the host out of the "
            "plan"
        )
    held = [p for optimizer in session.optimizers for group in optimizer.param_groups for p in group["params"]]
    devices = devices_of(held)
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "none"
        raise ApplyError(f"states are offloaded from one device, and the parameters of the optimizers are on {found}")
    return devices.pop()


def _check_updates_on_host(session: Session, choice: ChosenOption) -> None:
    for optimizer in session.optimizers:
        if type(optimizer).__name__ not in UPDATED_ON_HOST:
            raise ApplyError(
                f"{type(optimizer).__name__} has no fused implementation for the CPU; leave executor=host out of the "
                "plan"
            )
    if choice.settings.get("tier") == "disk":
        raise ApplyError(
            "parameters are updated on the host where their states are in its memory, not on disk; leave executor=host or tier=disk out of the plan"
        )
    if UpdateSettings.of(choice.settings).in_backward:
        raise ApplyError(
            "parameters that are updated on the host are not updated in the backward pass; leave one of the two out of the plan"
        )
