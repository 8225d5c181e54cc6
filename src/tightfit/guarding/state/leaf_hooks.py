"""The hooks on parameters and other leaves at the beginning of a step: a step that registers one, and is run again, would have it twice."""

from collections.abc import Iterable

import torch


class LeafHooks:
    """The hooks that the gradients of `leaves` go through now."""

    def __init__(self, leaves: Iterable[torch.Tensor]) -> None:
        self._before = [
            (leaf, dict(leaf._backward_hooks or ()), dict(leaf._post_accumulate_grad_hooks or ())) for leaf in leaves
        ]

    def restore(self) -> None:
        """Takes off those that were added, and puts back those that were removed."""
        for leaf, of_gradient, after_gradient in self._before:
            for hooks, before in (
                (leaf._backward_hooks, of_gradient),
                (leaf._post_accumulate_grad_hooks, after_gradient),
            ):
                # In place: autograd holds the dict.
                if hooks is not None and list(hooks.items()) != list(before.items()):
                    hooks.clear()
                    hooks.update(before)


def has_hooks(leaf: torch.Tensor) -> bool:
    """Whether somebody is called with its gradient."""
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)
