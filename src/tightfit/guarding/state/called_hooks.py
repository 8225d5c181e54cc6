"""The hooks that torch calls in a step, and no code of the program's names: on weights, and on optimizers. What they reach is state of the step."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

_OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def called_hooks(leaves: Iterable[torch.Tensor], optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """The hooks that there are now, by what they are on."""
    on_leaves = [
        hook
        for leaf in leaves
        for hooks in (leaf._backward_hooks, leaf._post_accumulate_grad_hooks)
        if hooks
        for hook in hooks.values()
    ]
    on_optimizers = [hooks for o in optimizers for name in _OF_OPTIMIZERS if (hooks := vars(o).get(name))]
    found = {"a hook on a weight": on_leaves, "a hook on an optimizer": on_optimizers}
    return {name: hooks for name, hooks in found.items() if hooks}
