"""The largest batch that a data loader can give: its data set is looked through for a bounded time, and the size of an example is the number of elements in it.

A loader in a known order gives the largest of its own batches; one that shuffles may put its largest examples together, so it gives these. They are collated
by the program's own `collate_fn`.
"""

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

_MAX_EXAMPLES = 20_000
MAX_SECONDS = 10.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """A batch as `collate_fn` returns it, with its number of elements, of how many examples of how many it is the largest, and the number of its largest example."""

    batch: Any
    num_elements: int
    num_seen: int
    num_examples: int
    largest_example: int

    def among(self) -> str:
        """Of how many examples it is the largest, in words."""
        is_part = self.num_seen < self.num_examples
        return f"{self.num_seen:,} of {self.num_examples:,}" if is_part else f"{self.num_examples:,}"


def can_be_looked_through(loader: DataLoader[Any]) -> bool:
    """Whether the loader's examples have numbers, of which its sampler makes batches."""
    dataset = loader.dataset
    has_numbers = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return has_numbers and not isinstance(dataset, IterableDataset) and loader.batch_sampler is not None


def sizes_of_examples(dataset: Any) -> dict[int, int]:
    """The elements of each example by its number: of all, or of as many as there is time for, spread over the data set."""
    count = len(dataset)
    end = time.monotonic() + MAX_SECONDS
    sizes: dict[int, int] = {}
    # Each round halves the distance between those that were looked at: whenever time is up, they are spread evenly.
    stride = 1 << max(0, count - 1).bit_length()
    while stride and len(sizes) < min(count, _MAX_EXAMPLES):
        for index in range(0, count, stride):
            if index not in sizes:
                sizes[index] = num_elements(dataset[index])
                if time.monotonic() > end or len(sizes) >= _MAX_EXAMPLES:
                    return sizes
        stride //= 2
    return sizes


def largest_batch(loader: Any, sizes: dict[int, int]) -> LargestBatch | None:
    """The largest batch, by the sizes of examples; None if the loader has none. Its sampler may be asked for all of its batches."""
    sampler, dataset = loader.batch_sampler, loader.dataset
    if type(sampler) is BatchSampler and type(sampler.sampler) is RandomSampler:
        indices = sorted(sizes, key=lambda index: -sizes[index])[: sampler.batch_size]
    else:
        # It is asked for its batches once more; random states are put back afterwards.
        batches = [batch for batch, _ in zip(sampler, range(_MAX_EXAMPLES), strict=False)]
        indices = max(batches, key=lambda batch: _size([sizes.get(index, 0) for index in batch]), default=[])
    if not indices:
        return None
    batch = loader.collate_fn([dataset[index] for index in indices])
    if loader.pin_memory:
        batch = tree_map_only(torch.Tensor, torch.Tensor.pin_memory, batch)
    return LargestBatch(
        batch=batch,
        num_elements=num_elements(batch),
        num_seen=len(sizes),
        num_examples=len(dataset),
        largest_example=max(indices, key=lambda index: sizes.get(index, 0)),
    )


def _size(sizes: Sequence[int]) -> tuple[int, int]:
    """What orders batches: examples that are padded are all as large as the largest; where they are joined, their sum decides."""
    return len(sizes) * max(sizes, default=0), sum(sizes)


def num_elements(value: Any) -> int:
    """The elements of all tensors and arrays, or where there are none the numbers and characters."""
    leaves = tree_leaves(value)
    of_arrays = sum(math.prod(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor | np.ndarray))
    return of_arrays or sum(len(leaf) if isinstance(leaf, str | bytes) else 1 for leaf in leaves)


def shapes_of(batch: Any) -> str:
    """The shapes of the tensors of a batch, each once."""
    shapes = [
        "x".join(map(str, leaf.shape)) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()
    ]
    return ", ".join(dict.fromkeys(shapes)) or "no tensors"
