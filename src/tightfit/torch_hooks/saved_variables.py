"""The attributes of a node of an autograd graph that hold what it has saved, without unpacking it."""

from functools import cache
from typing import Any

import torch

from tightfit.torch_hooks.manifest import SAVED_PREFIX

_CONTEXT = torch.autograd.function.BackwardCFunction


def saved_variables_of(node: Any) -> tuple[str, ...]:
    """The names of its saved variables: one for each input of its derivative formula that is saved."""
    kind = type(node)
    # Each `torch.autograd.Function` has a class of contexts, which a cache would keep, and with it all that the program's module holds.
    return _names(_CONTEXT if issubclass(kind, _CONTEXT) else kind)


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith(SAVED_PREFIX))
