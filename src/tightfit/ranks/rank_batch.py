"""The arguments of a model's call, and the part of them that one rank has."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tightfit.errors import ApplyError
from tightfit.ranks.divided_outputs import Unused
from tightfit.ranks.written_arguments import CopiedArguments
from tightfit.techniques.micro_batches.batches import AbstractBatch, Instead, check_rows, whole_argument
from tightfit.techniques.micro_batches.loaded_batch import leaves_of

_PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))


def shares(num_examples: int, num_ranks: int) -> list[tuple[int, int]]:
    """The examples of each rank: as many each, and one more for the first ones where that does not go."""
    each, more = divmod(num_examples, num_ranks)
    ends = [each * (rank + 1) + min(rank + 1, more) for rank in range(num_ranks)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


class RankBatch(AbstractBatch):
    """Tensors whose first dimension is that of the first tensor are split, also in lists, tuples and dicts; those of length one are shared.

    Other than in micro-batches an argument may want a gradient: its rows are leaves of the part, and `wanting` has the tensors that they are of.

    Raises:
        ApplyError: it is not clear how to split them, or there is nothing to split.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._args, self._kwargs = list(args), dict(kwargs)
        named = [(str(n), leaf) for n, value in (*enumerate(args), *kwargs.items()) for leaf in leaves_of(value)]
        tensors = [(n, leaf) for n, leaf in named if isinstance(leaf, torch.Tensor) and leaf.dim()]
        if not tensors:
            raise ApplyError("the model is called without a tensor that could be split over the ranks")
        for name, tensor in tensors:
            check_rows(f"argument {name}", tensor)
        first = tensors[0][1]
        super().__init__(int(first.shape[0]), first.device)
        for name, leaf in named:
            if isinstance(leaf, torch.Tensor):
                if leaf.dim() > 1 and leaf.shape[0] not in (1, self.num_examples):
                    raise ApplyError(
                        f"argument {name} has {leaf.shape[0]} rows where the batch has {self.num_examples}: how to split it is not known"
                    )
                if leaf.requires_grad and not self._is_split(leaf):
                    raise ApplyError(f"argument {name} is shared by all examples and wants a gradient of its own")
            elif isinstance(leaf, Unused):
                raise ApplyError(leaf.why)
            elif not isinstance(leaf, _PLAIN):
                raise ApplyError(f"argument {name} is a {type(leaf).__name__}, which is not known how to split")
        for name, value in (*enumerate(args), *kwargs.items()):
            if self._has_row_of_plain(value):
                raise ApplyError(
                    f"argument {name} holds a list of {self.num_examples} values, as many as there are examples: whether they are the examples' is not known"
                )
        self.wanting: list[torch.Tensor] = []
        self.leaves: list[torch.Tensor] = []
        self.copied = CopiedArguments([], [])

    def part(self, begin: int, end: int, instead: Instead | None = None) -> tuple[list[Any], dict[str, Any]]:
        """The arguments for the examples in `range(begin, end)`; with `instead`, its result for each tensor that is split."""

        def cut(value: Any) -> Any:
            if not (isinstance(value, torch.Tensor) and self._is_split(value)):
                return value
            return value[begin:end] if instead is None else instead(value)

        return [mapped(value, cut) for value in self._args], {n: mapped(v, cut) for n, v in self._kwargs.items()}

    def own_part(self, begin: int, end: int) -> tuple[list[Any], dict[str, Any]]:
        """The same, with tensors that want a gradient as leaves: their graph is the program's, and is not of this part."""
        self.wanting, self.leaves = [], []

        def cut(value: torch.Tensor) -> torch.Tensor:
            rows = value[begin:end]
            if not value.requires_grad:
                return rows
            rows = rows.detach().requires_grad_()
            self.wanting.append(value)
            self.leaves.append(rows)
            return rows

        args, kwargs = self.part(begin, end, cut)
        self.copied = CopiedArguments([*self._args, *self._kwargs.values()], [*args, *kwargs.values()])
        return args, kwargs

    def original_of(self, output: torch.Tensor, part: tuple[int, int]) -> torch.Tensor | None:
        """The argument of the program's of which an output of the model is this part's rows as they are; None for others."""
        for wanted, leaf in zip(self.wanting, self.leaves, strict=True):
            if output is leaf:
                return wanted
        return whole_argument(output, part, self)

    def _is_split(self, tensor: torch.Tensor) -> bool:
        return bool(tensor.dim()) and tensor.shape[0] == self.num_examples

    def _has_row_of_plain(self, value: Any) -> bool:
        if isinstance(value, Mapping):
            return any(map(self._has_row_of_plain, value.values()))
        if not isinstance(value, list | tuple):
            return False
        is_row = len(value) == self.num_examples and not any(
            isinstance(each, torch.Tensor) for each in leaves_of(value)
        )
        return (is_row and bool(value)) or any(map(self._has_row_of_plain, value))


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same structure, of the same types, with `change` around each leaf."""
    if isinstance(value, Mapping):
        # Outputs and batches of libraries are classes of their own, with attributes that the program may use.
        kind: Callable[..., Any] = type(value)
        items = {key: mapped(item, change) for key, item in value.items()}
        if type(value) is dict:
            return items
        if hasattr(value, "to_tuple"):
            return kind(**items)
        same = copy.copy(value)
        same.update(items)  # type: ignore[attr-defined]
        return same
    if isinstance(value, list | tuple):
        kind, each = type(value), [mapped(item, change) for item in value]
        # Named tuples take their items one by one.
        return kind(*each) if hasattr(value, "_fields") else kind(each)
    return change(value)
