"""Puts `autocast` on live objects: see `tightfit.techniques.precision.autocast` for what it is and where it comes from."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tightfit.errors import ApplyError
from tightfit.techniques.lazy_tensors.asked_gradients import watch_inputs_of_backward
from tightfit.techniques.precision.casts import cast_results, told_of_types
from tightfit.techniques.session import Session
from tightfit.techniques.technique import ChosenOption

_NAME = "autocast"


def apply_autocast(session: Session, chosen: Sequence[ChosenOption]) -> None:
    """Runs the model's forward under autocast and returns its results in float32, as the loss outside expects them."""
    first = next((p for p in session.model.parameters() if p.is_floating_point()), None)
    if first is None:
        raise ApplyError(
            f"{type(session.model).__name__} has no floating-point parameter to run in bfloat16; leave autocast out"
        )
    device_type = first.device.type

    refuse = functools.partial(session.verdict.refuse, technique=_NAME)

    def around(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # A forward that the script itself runs under autocast keeps the script's dtype.
        if torch.is_autocast_enabled(device_type):
            return forward(*args, **kwargs)
        with torch.autocast(device_type, dtype=torch.bfloat16), told_of_types(refuse, "under autocast", _NAME):
            result = forward(*args, **kwargs)
        return cast_results(result, torch.float32, refuse)

    session.wrap_forward(session.model, around)
    watch_inputs_of_backward(session)
