"""Takes hooks off, also while torch goes through the hooks of the optimizer that is stepped: a dict whose size changes then ends the program's step with an error."""

import sys
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

# What torch puts around the step of each class: one function, whose code all of them share.
_STEP = Optimizer.profile_hook_step(lambda optimizer: optimizer).__code__


def take_off_hook(handle: RemovableHandle) -> None:
    """Removes a hook; called by a step hook of its optimizer, it puts one there that does nothing, and stays."""
    hooks: Any = handle.hooks_dict_ref()
    if hooks is not None and handle.id in hooks and any(hooks is each for each in _gone_through()):
        hooks[handle.id] = _nothing
    else:
        handle.remove()


def is_called_by_step_hook(optimizer: Optimizer) -> bool:
    """Whether torch is going through the step hooks of this optimizer, and waits for one of them."""
    return any(hooks is each for hooks in _hooks_of(optimizer) for each in _gone_through())


def is_stepped(optimizer: Optimizer) -> bool:
    """Whether this is called within a step of this optimizer: by its closure, say."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is _STEP and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False


def _nothing(*_: object) -> None:
    """Stands in for a hook that is gone."""


def _gone_through() -> list[Any]:
    found: list[Any] = []
    inner, frame = None, sys._getframe()
    while frame is not None:
        if frame.f_code is _STEP and inner is not None:
            # The step itself, which may call a closure, is no hook.
            step = getattr(frame.f_locals.get("func"), "__code__", None)
            if inner.f_code is not step:
                found += _hooks_of(frame.f_locals.get("self"))
        inner, frame = frame, frame.f_back
    return found


def _hooks_of(optimizer: Any) -> list[Any]:
    own = vars(optimizer) if isinstance(optimizer, Optimizer) else {}
    return [own[name] for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks") if name in own]
