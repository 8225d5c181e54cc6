"""The settings of torch that decide what code computes and that no module holds: put around code that runs a second time, in a backward pass.

`torch.utils.checkpoint` puts back autocast and torch's random states; a user may also have made a forward inside `sdpa_kernel(...)`, another default
type, all of which are over when the backward pass runs; and a default device is a thread's own, and not that of the backward pass.
"""

import copy
import dataclasses
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    (lambda: torch.backends.cudnn.enabled, lambda value: setattr(torch.backends.cudnn, "enabled", value)),
)


def _autocast_depth() -> int:
    """In how many contexts of autocast this is: what it casts is kept until the outermost one is left."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def _put_autocast_depth(depth: int) -> None:
    for _ in range(_autocast_depth() - depth):
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def takes_saved_tensor_hooks() -> bool:
    """Whether hooks for saved tensors may be set here, or the program has switched them off."""
    return bool(torch._C._autograd._saved_tensors_hooks_is_enabled())  # pyrefly: ignore[missing-attribute]


def may_saved_tensors_be_written() -> bool:
    """Whether the program is inside of `allow_mutation_on_saved_tensors`, which keeps copies of what is written to after it was saved."""
    return torch.autograd.graph._allow_mutation_on_saved_tensors_enabled


def are_saved_tensor_hooks_refused(error: BaseException) -> bool:
    """Whether this is torch's error where code that takes no hooks for saved tensors (torch.func.grad) is run inside of some."""
    return (
        traceback.extract_tb(error.__traceback__)[-1].name == torch.autograd.graph.disable_saved_tensors_hooks.__name__
    )


def saved_apart() -> AbstractContextManager[Any, None]:
    """While this lasts, what is saved for a backward pass is no part of what a checkpoint around it counts. Detached, or a result would hold itself."""
    if not takes_saved_tensor_hooks():
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.detach(), lambda saved: saved)


@contextmanager
def _entered_apart(mode: Any) -> Iterator[None]:
    """Enters a copy of a mode: it remembers what was there before it, and may still be entered elsewhere."""
    if not isinstance(mode, DeviceContext):
        with copy.copy(mode):
            yield
        return
    # torch enters the program's own within this one, and it would put this one back when the program leaves it.
    before = mode.prev_mode
    try:
        with DeviceContext(mode.device):
            yield
    finally:
        mode.prev_mode = before


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ambient:
    """The settings at one time; `modes` are the function modes that were entered, such as a `torch.device` used as a context."""

    values: tuple[Any, ...]
    modes: tuple[Any, ...]

    @classmethod
    def now(cls) -> "Ambient":
        """The settings as they are."""
        return cls(values=tuple(get() for get, _ in _SETTINGS), modes=tuple(_get_current_function_mode_stack()))

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """While this lasts, the settings are these; afterwards what they were before, whatever was left of them by code that was cut short."""
        now, depth = Ambient.now(), _autocast_depth()
        try:
            with ExitStack() as modes:
                self._put(now)
                for mode in self._left(now):
                    modes.enter_context(_entered_apart(mode))
                yield
        finally:
            now._put(Ambient.now())
            _put_autocast_depth(depth)

    def _left(self, now: "Ambient") -> list[Any]:
        return [mode for mode in self.modes if not any(mode is other for other in now.modes)]

    def unknown_modes(self) -> list[str]:
        """The modes that were entered then and are not now, but for a default device and our own, which only look on: what they do is not known."""
        left = [type(mode) for mode in self._left(Ambient.now())]
        return [m.__name__ for m in left if m is not DeviceContext and m.__module__.partition(".")[0] != "tightfit"]

    def _put(self, instead_of: "Ambient") -> None:
        for (_, put), value, other in zip(_SETTINGS, self.values, instead_of.values, strict=True):
            if value != other:
                put(value)
