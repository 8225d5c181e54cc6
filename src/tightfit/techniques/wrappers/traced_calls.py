"""Tells the calls that only look at a model (a trace for a server, a graph for a log, shapes without numbers) from those that train it.

A technique would end up inside of what is traced, and has no values to compare where tensors have none: it stays out of such calls, which hold
nothing for a step.
"""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from tightfit.effects.values.value_checks import has_values


def is_looked_at(*given: Any) -> bool:
    """Whether a call with this is traced (`torch.jit.trace`, `torch.fx`), or its tensors are on the meta device."""
    return torch.jit.is_tracing() or any(
        leaf.is_meta if isinstance(leaf, torch.Tensor) else isinstance(leaf, torch.fx.Proxy)
        for leaf in tree_leaves(given)
    )


def is_among_values(weight: torch.Tensor) -> bool:
    """Whether operators on a weight with values are only traced, or have fake results: a copy of it would have no values."""
    if torch.jit.is_tracing():
        return True
    modes = _get_current_dispatch_mode_stack()
    return any(isinstance(mode, FakeTensorMode | ProxyTorchDispatchMode) for mode in modes) and has_values(weight)
