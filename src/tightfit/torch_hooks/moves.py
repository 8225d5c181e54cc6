"""Notifies owners of moves and casts of modules (`module.to`, `module.cuda`), around the outermost of the calls that they consist of."""

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch

from tightfit.torch_hooks.manifest import MODULE_APPLY
from tightfit.torch_hooks.replaced import Leave, Replaced


class MoveOwner(Protocol):
    """Is entered around moves of modules. It is held weakly."""

    def around_move(
        self, module: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor]
    ) -> AbstractContextManager[None]:
        """Around the call that applies `function` to each tensor of `module` and its submodules."""
        ...


def on_module_moves(owner: MoveOwner) -> Leave:
    """Has `owner` around moves of modules until the returned function is called or the owner is collected.

    Raises:
        ApplyError: this torch has no such name.
    """
    return _MOVES.enter(owner)


class _Inside(threading.local):
    """Whether this thread moves a module, whose children are moved by calls of their own."""

    value = False


_INSIDE = _Inside()


def _put(inner: Callable[..., Any], owners: Callable[[], list[MoveOwner]]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def _apply(module: torch.nn.Module, function: Any, *args: Any, **kwargs: Any) -> Any:
        if _INSIDE.value:
            return inner(module, function, *args, **kwargs)
        _INSIDE.value = True
        try:
            with ExitStack() as around:
                for owner in owners():
                    around.enter_context(owner.around_move(module, function))
                return inner(module, function, *args, **kwargs)
        finally:
            _INSIDE.value = False

    return _apply


_MOVES: Replaced[MoveOwner] = Replaced(MODULE_APPLY, _put)
