"""Global settings of torch that decide what code computes: saved in the forward pass and restored around a recomputation in the backward pass.

`torch.utils.checkpoint` restores autocast and torch's random states; a forward may also have run inside `sdpa_kernel(...)` or under another
default dtype, which have ended when the backward pass runs; and a default device is thread-local, and not set in autograd's thread.
"""

import copy
import dataclasses
import sys
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tightfit.effects.global_settings import precisions, precisions_of, put, values

# Functions of the mode's between its method and torch, and torch's own decorators.
_FRAMES_TO_MODE = 12


def _autocast_depth() -> int:
    """The nesting depth of autocast contexts: cached casts are retained until the outermost one is left."""
    # torch has no function that reads the depth.
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def _put_autocast_depth(depth: int) -> None:
    # A recomputation that stops early skips what comes after: where a program enters autocast in a forward
    # pre-hook and leaves it in a forward hook, its depth and its cached casts would stay for the rest of the
    # process (docs/log.md, 2026-11-22).
    for _ in range(_autocast_depth() - depth):
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def takes_saved_tensor_hooks() -> bool:
    """Whether hooks for saved tensors are enabled here."""
    return bool(torch._C._autograd._saved_tensors_hooks_is_enabled())  # pyrefly: ignore[missing-attribute]


def may_saved_tensors_be_written() -> bool:
    """Whether the program is inside of `allow_mutation_on_saved_tensors`, which clones saved tensors before they are written to."""
    return torch.autograd.graph._allow_mutation_on_saved_tensors_enabled


def are_saved_tensor_hooks_refused(error: BaseException) -> bool:
    """Whether this is torch's error for code that disables saved tensor hooks (torch.func.grad) run inside of such hooks."""
    return (
        traceback.extract_tb(error.__traceback__)[-1].name == torch.autograd.graph.disable_saved_tensors_hooks.__name__
    )


def saved_apart() -> AbstractContextManager[Any, None]:
    """Hides tensors saved for backward from a checkpoint around this code. They are detached, or a result that is saved would refer to itself."""
    if not takes_saved_tensor_hooks():
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.detach(), lambda saved: saved)


@contextmanager
def _entered_apart(mode: Any) -> Iterator[None]:
    """Enters a copy of a mode: a mode remembers the one before it, and the original may still be entered elsewhere."""
    if not isinstance(mode, DeviceContext):
        with copy.copy(mode):
            yield
        return
    # torch enters the program's own within this one, and it would put this one back when the program leaves it.
    # Up to torch 2.10 it puts none back.
    before = vars(mode).get("prev_mode")
    try:
        with DeviceContext(mode.device):
            yield
    finally:
        mode.prev_mode = before


def dispatch_modes_of_program() -> list[Any]:
    """The modes of the program's, or of a library's, that see each operator now; those of torch are there for tools and for torch itself."""
    return [mode for mode in _get_current_dispatch_mode_stack() if _is_of_program(mode)]


def modes_of_program() -> list[Any]:
    """The same, and those that see each function of torch: what is computed at another time, or otherwise, they would not see, or see twice."""
    return [mode for mode in _get_current_function_mode_stack() if _is_of_program(mode)] + dispatch_modes_of_program()


def is_shown_to_function_modes() -> bool:
    """Whether a function of torch's that is running now was called by a function mode of the program's, which torch takes off its stack for as long."""
    frame = sys._getframe(1)
    for _ in range(_FRAMES_TO_MODE):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_code.co_name == "__torch_function__":
            mode = frame.f_locals.get("self")
            if isinstance(mode, TorchFunctionMode) and _is_of_program(mode):
                return True
    return False


def names_of_modes() -> list[str]:
    """The names of their classes."""
    return [type(mode).__name__ for mode in modes_of_program()]


def _is_of_program(mode: Any) -> bool:
    return type(mode).__module__.partition(".")[0] not in ("torch", "tightfit")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ambient:
    """The settings at one time; `modes` are the function modes that were entered, such as a `torch.device` used as a context, `dispatch_modes` the program's
    that see operators."""

    values: tuple[Any, ...]
    modes: tuple[Any, ...]
    dispatch_modes: tuple[Any, ...]

    @classmethod
    def now(cls) -> "Ambient":
        """The current settings."""
        return cls(
            values=values(),
            modes=tuple(_get_current_function_mode_stack()),
            dispatch_modes=tuple(dispatch_modes_of_program()),
        )

    @contextmanager
    def put_back(self, now: "Ambient | None" = None) -> Iterator[None]:
        """Restores these settings for a block, and the previous ones afterwards, also if the block was cut short. `now` are the present ones, if they are known."""
        now, depth = now or Ambient.now(), _autocast_depth()
        left = self._left(now)
        try:
            put(self.values, now.values)
            if not left:
                yield
                return
            with ExitStack() as modes:
                for mode in left:
                    modes.enter_context(_entered_apart(mode))
                yield
        finally:
            put(now.values, values())
            _put_autocast_depth(depth)

    def rounds_as_now(self) -> bool:
        """Whether products were rounded as they are now."""
        return precisions_of(self.values) == precisions()

    def put(self) -> None:
        """Makes these the settings again, but for the modes, which end by themselves."""
        put(self.values, values())

    def _left(self, now: "Ambient") -> list[Any]:
        return [mode for mode in self.modes if not any(mode is other for other in now.modes)]

    def unknown_modes(self, now: "Ambient") -> list[str]:
        """The modes that were active then and are not now, except a default device and our own, which only observe: their effect is unknown."""
        left = [type(mode) for mode in self._left(now)]
        return [m.__name__ for m in left if m is not DeviceContext and m.__module__.partition(".")[0] != "tightfit"]

    def other_dispatch_modes(self, now: "Ambient") -> list[str]:
        """The modes of the program's that see operators now and did not then, or the other way round."""
        others = [mode for mode in now.dispatch_modes if not any(mode is each for each in self.dispatch_modes)]
        others += [mode for mode in self.dispatch_modes if not any(mode is each for each in now.dispatch_modes)]
        return [type(mode).__name__ for mode in others]
