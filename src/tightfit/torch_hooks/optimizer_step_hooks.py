"""Takes hooks off, also while torch goes through the hooks of the optimizer that is stepped: a dict whose size changes then ends the program's step with an error."""

import sys
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

# What torch puts around the step of each class: one function, whose code all of them share.
_STEP = Optimizer.profile_hook_step(lambda optimizer: optimizer).__code__


def take_off_hook(handle: RemovableHandle) -> None:
    """Removes a hook; within a step of its optimizer it is replaced by one that does nothing, and stays."""
    hooks: Any = handle.hooks_dict_ref()
    if hooks is not None and handle.id in hooks and _is_gone_through(hooks):
        hooks[handle.id] = _nothing
    else:
        handle.remove()


def _nothing(*_: object) -> None:
    """Stands in for a hook that is gone."""


def _is_gone_through(hooks: Any) -> bool:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is _STEP:
            optimizer = frame.f_locals.get("self")
            of_step = vars(optimizer) if optimizer is not None else {}
            if hooks is of_step.get("_optimizer_step_pre_hooks") or hooks is of_step.get("_optimizer_step_post_hooks"):
                return True
        frame = frame.f_back
    return False
