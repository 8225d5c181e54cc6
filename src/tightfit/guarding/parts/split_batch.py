"""A batch as examples along the first dimension of its tensors."""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from tightfit.errors import UsageError

_ORDERED = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64})  # fmt: skip


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


def unlike_examples(batch: Any) -> tuple[int, int]:
    """Two examples that differ most in how much of them is padding, zero, or left out of a loss: a mean over something else than examples differs for them.

    What is counted in each tensor are its smallest and its largest value (`-100` of labels, the number of a padding token, `False` of a mask) and zero.
    """
    most, found = 0.0, (0, 1)
    for tensor in tree_leaves(batch):
        if not isinstance(tensor, torch.Tensor) or not tensor.dim() or not tensor.numel():
            continue
        if tensor.dtype not in _ORDERED:
            continue
        rows = tensor.detach().reshape(len(tensor), -1)
        for value in (rows.min(), rows.max(), torch.zeros((), dtype=rows.dtype, device=rows.device)):
            counts = (rows == value).sum(1).float() / rows.shape[1]
            spread = float(counts.max() - counts.min())
            if spread > most:
                most, found = spread, (int(counts.argmin()), int(counts.argmax()))
    return found


def examples_of(batch: Any, *numbers: int) -> Any:
    """These examples, in this order."""
    return tree_map_only(torch.Tensor, lambda t: t[list(numbers)] if t.dim() else t, batch)
