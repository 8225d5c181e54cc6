"""Finds the module of the `forward` that a wrapper was given."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from tightfit.techniques.wrappers.forwards import WrappedForward


def module_of(forward: Callable[..., Any]) -> torch.nn.Module:
    """The module of this forward, which in a copy of a model is not the one that the wrapper was made for."""
    if isinstance(forward, functools.partial):
        return forward.args[0]
    if isinstance(forward, WrappedForward):
        return forward.module
    return forward.__self__  # type: ignore[attr-defined]
