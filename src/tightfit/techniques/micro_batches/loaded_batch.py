"""A batch from a data loader: tensors in lists, tuples and dicts, each with one row per example."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tightfit.errors import ApplyError
from tightfit.techniques.micro_batches.batches import AbstractBatch, Instead, check_rows

_SHARED = (bool, int, float, str, torch.dtype, torch.device, type(None))


class LoadedBatch(AbstractBatch):
    """The batch argument of a training step. Lists with one string or number per example are split as well; single values are shared.

    Raises:
        ApplyError: it is not clear how to split it, or there is nothing to split.
    """

    def __init__(self, args: Sequence[Any], _: Mapping[str, Any]) -> None:
        (self._batch,) = args
        for leaf in leaves_of(self._batch):
            if isinstance(leaf, torch.Tensor):
                check_rows("the batch", leaf)
        first = _first_tensor(self._batch)
        super().__init__(int(first.shape[0]), first.device)
        for leaf in leaves_of(self._batch):
            if isinstance(leaf, torch.Tensor):
                if leaf.dim() and leaf.shape[0] != self.num_examples:
                    raise ApplyError(
                        f"the batch holds tensors of {self.num_examples} and of {leaf.shape[0]} rows, so "
                        "micro_batches cannot split it; leave micro_batches out"
                    )
            elif not isinstance(leaf, _SHARED):
                raise ApplyError(
                    f"the batch holds a {type(leaf).__name__}, which micro_batches cannot split; leave micro_batches "
                    "out"
                )

    def part(self, begin: int, end: int, instead: Instead | None = None) -> tuple[Sequence[Any], dict[str, Any]]:
        """The batch of the examples in `range(begin, end)`; with `instead`, its result for each tensor that is split."""

        def cut(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.dim():
                return value[begin:end] if instead is None else instead(value)
            return value[begin:end] if self._is_row_of_plain(value) else value

        return [_mapped(self._batch, cut, self._is_row_of_plain)], {}

    def _is_row_of_plain(self, value: Any) -> bool:
        """Whether this is a list with one string or number per example."""
        is_row = isinstance(value, list | tuple) and len(value) == self.num_examples
        return is_row and all(isinstance(item, _SHARED) for item in value)


def num_examples(batch: Any) -> int:
    """The number of examples of a batch or a part of one: the rows of its first tensor."""
    return int(_first_tensor(batch).shape[0])


def _first_tensor(batch: Any) -> torch.Tensor:
    for leaf in leaves_of(batch):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return leaf
    raise ApplyError("the batch holds no tensor that could be split; leave micro_batches out")


def leaves_of(value: Any) -> Iterator[Any]:
    """What lists, tuples and mappings hold, in their order; anything else is a leaf."""
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        yield value
        return
    for item in value:
        yield from leaves_of(item)


def _mapped(value: Any, cut: Callable[[Any], Any], is_leaf: Callable[[Any], bool]) -> Any:
    """The same structure, of the same types, with `cut` around each leaf."""
    if is_leaf(value):
        return cut(value)
    if isinstance(value, Mapping):
        # BatchEncoding and other dict classes of libraries have attributes and methods (`.to`) that the step
        # may use.
        kind: Callable[..., Any] = type(value)
        return kind({key: _mapped(item, cut, is_leaf) for key, item in value.items()})
    if isinstance(value, list | tuple):
        kind, items = type(value), [_mapped(item, cut, is_leaf) for item in value]
        # Named tuples take their items one by one.
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    return cut(value)
