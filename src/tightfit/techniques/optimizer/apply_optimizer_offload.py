"""Puts `optimizer_offload` on live objects: see `tightfit.techniques.optimizer.optimizer_offload` for what it is and where it comes from."""

from collections.abc import Sequence

from tightfit.engine.host_slab import unregister_gone
from tightfit.errors import ApplyError
from tightfit.techniques.optimizer.host_codec import HostCodec
from tightfit.techniques.optimizer.quantized_states import encode_states
from tightfit.techniques.optimizer.state_sizes import MIN_NUMBERS
from tightfit.techniques.session import Session
from tightfit.techniques.technique import Choice

_NAME = "optimizer_offload"


def apply_optimizer_offload(session: Session, chosen: Sequence[Choice]) -> None:
    """Replaces the optimizers' steps.

    Raises:
        ApplyError: the parameters are on several devices, the host has too little memory, or an optimizer cannot be stepped parameter by parameter.
    """
    (choice,) = chosen
    held = [p for optimizer in session.optimizers for group in optimizer.param_groups for p in group["params"]]
    devices = {parameter.device for parameter in held}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "none"
        raise ApplyError(f"states are offloaded from one device, and the parameters of the optimizers are on {found}")
    device = devices.pop()
    least = int(choice.settings.get("least_elements", MIN_NUMBERS))
    codec = HostCodec(device, int(choice.settings["host_bytes"]), least_elements=least)
    # Undone last, when no state is at the host any more.
    session.when_undone(unregister_gone)
    encode_states(session, codec, _NAME, choice.settings)
    if device.type == "cuda" and not codec.slab.is_registered:
        session.notes.append(
            "the host memory for optimizer states could not be page-locked (a limit on locked memory?): copies will be slow"
        )
