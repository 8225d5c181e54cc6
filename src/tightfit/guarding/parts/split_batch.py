"""A batch as examples along the first dimension of its tensors."""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from tightfit.errors import UsageError


def num_examples_of(batch: Any) -> int:
    """How many examples a batch has.

    Raises:
        UsageError: its tensors have other first dimensions than each other, or it holds something beside tensors whose examples are not known.
    """
    leaves = tree_leaves(batch)
    lengths = {leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()}
    others = [
        leaf for leaf in leaves if not isinstance(leaf, torch.Tensor | int | float | bool | str) and leaf is not None
    ]
    if len(lengths) != 1 or others or any(isinstance(leaf, str) for leaf in leaves):
        found = (
            "a " + type(others[0]).__name__
            if others
            else "first dimensions of " + (", ".join(map(str, sorted(lengths))) or "no tensor, or texts")
        )
        raise UsageError(
            f"guarded.backward splits a batch along the first dimension of its tensors, and this one has {found}: give it what the loss is computed from alone"
        )
    return lengths.pop()


def part_of(batch: Any, begin: int, end: int) -> Any:
    """The examples in `range(begin, end)`; numbers and tensors without dimensions go with each part."""
    return tree_map_only(torch.Tensor, lambda t: t[begin:end] if t.dim() else t, batch)


def num_elements_of(batch: Any) -> int:
    """The elements of one example."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    return sum(t[:1].numel() for t in tensors)
