"""Finds the module of the `forward` that a wrapper was given."""

from collections.abc import Callable
from typing import Any

import torch

from tightfit.techniques.wrappers.forwards import WrappedForward


def module_of(forward: Callable[..., Any]) -> torch.nn.Module:
    """The module of this forward, which in a copy of a model is not the one that the wrapper was made for."""
    if isinstance(forward, WrappedForward):
        return forward.module
    # A bound method, or the partial function of a `functools.partialmethod`, which says what it is bound to as well.
    bound_to = getattr(forward, "__self__", None)
    return bound_to if isinstance(bound_to, torch.nn.Module) else forward.args[0]  # type: ignore[attr-defined]
