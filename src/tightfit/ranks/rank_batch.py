"""The arguments of a model's call, and the part of them that one rank has."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tightfit.errors import ApplyError
from tightfit.ranks.values.divided_outputs import Unused
from tightfit.ranks.values.structures import attributes_of, mapped
from tightfit.ranks.values.written_arguments import CopiedArguments
from tightfit.techniques.micro_batches.batches import AbstractBatch, Instead, check_rows, whole_argument

_PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))
# Of arguments that may be shared: each is tried with a run of a part.
_MOST_READINGS = 4


def shares(num_examples: int, num_ranks: int) -> list[tuple[int, int]]:
    """The examples of each rank: as many each, and one more for the first ones where that does not go."""
    each, more = divmod(num_examples, num_ranks)
    ends = [each * (rank + 1) + min(rank + 1, more) for rank in range(num_ranks)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


class RankBatch(AbstractBatch):
    """Tensors whose first dimension is that of the first tensor are split, also in lists, tuples, dicts and dataclasses; all others are shared, and those whose names are in `shared`.

    That is no guess: whether a part, with what it shares, gives what the whole gives is proved of either. Other than in micro-batches an argument may want a gradient: its rows are leaves of the part,
    and `wanting` has the tensors that they are of.

    Raises:
        ApplyError: it is not clear how to split them, or there is nothing to split.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, shared: Collection[str] = ()) -> None:
        self._args, self._kwargs = list(args), dict(kwargs)
        named = [
            (f"{n}{path}", leaf) for n, value in (*enumerate(args), *kwargs.items()) for path, leaf in _named(value)
        ]
        tensors = [(n, leaf) for n, leaf in named if isinstance(leaf, torch.Tensor) and leaf.dim()]
        if not tensors:
            raise ApplyError("the model is called without a tensor that could be split over the ranks")
        for name, tensor in tensors:
            check_rows(f"argument {name}", tensor)
        first = tensors[0][1]
        super().__init__(int(first.shape[0]), first.device)
        self._tensors, self._leaves = tensors, [leaf for _, leaf in named]
        self.shared = frozenset(shared)
        # By identity, which a tensor that has two names has once: it is split by either.
        split = {id(tensor) for name, tensor in tensors if name not in self.shared} | {id(first)}
        self._shared = {id(tensor) for name, tensor in tensors if name in self.shared} - split
        self.plain = [(name, leaf) for name, leaf in named if isinstance(leaf, _PLAIN)]
        for name, leaf in named:
            if isinstance(leaf, torch.Tensor):
                if leaf.requires_grad and not self._is_split(leaf):
                    raise ApplyError(
                        f"argument {name} is shared by all examples and requires a gradient: make it a parameter of the model"
                    )
            elif isinstance(leaf, Unused):
                raise ApplyError(leaf.why)
            elif not isinstance(leaf, _PLAIN):
                raise ApplyError(
                    f"argument {name} is a {type(leaf).__name__}, which is not known how to split: give the model tensors, also in tuples, lists, dicts and dataclasses"
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

    def of_other_rows(self) -> frozenset[str]:
        """The names of tensors with another number of rows than there are examples: all examples share them, and will where they have as many by chance."""
        return frozenset(name for name, tensor in self._tensors if tensor.shape[0] not in (1, self.num_examples))

    def readings(self) -> Iterator["RankBatch"]:
        """The same batch, with tensors shared that have as many rows as there are examples by chance: a mask of tokens by tokens, weights of classes."""
        doubtful = [
            (name, tensor)
            for name, tensor in self._tensors[1:]
            if self._is_split(tensor) and tensor is not self._tensors[0][1] and not tensor.requires_grad
        ]
        square = [name for name, tensor in doubtful if tensor.dim() > 1 and tensor.shape[0] == tensor.shape[1]]
        sets = [square, *([name] for name, _ in doubtful[:_MOST_READINGS])]
        for names in dict.fromkeys(tuple(each) for each in sets if each):
            yield RankBatch(self._args, self._kwargs, shared={*self.shared, *names})

    def hint(self) -> str:
        """What about the arguments may be why a part does not give what the whole gives, as the end of a sentence, or nothing."""
        for name, value in (*enumerate(self._args), *self._kwargs.items()):
            if self._has_row_of_plain(value):
                return f"; argument {name} has as many values as there are examples, and all examples get them all: give values of each example as a tensor"
        for name, tensor in self._tensors:
            if tensor.dim() > 1 and tensor.shape[0] not in (1, self.num_examples):
                return f"; argument {name} has {tensor.shape[0]} rows where the batch has {self.num_examples}, and all examples get all of it: give the model a row for each example"
            if self._is_split(tensor) and tensor.dim() > 1 and tensor.shape[0] == tensor.shape[1] and tensor is not self._tensors[0][1]:  # fmt: skip
                return f"; argument {name} has as many rows as there are examples, and is divided: give what all examples share a first dimension of 1"
        return ""

    def every_tensor(self) -> list[torch.Tensor]:
        """All tensors among the arguments, in their order."""
        return [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)]

    def rest_key(self) -> Any:
        """What a proof goes by, besides the tensors that are split: the shapes of the others, numbers and texts."""
        shapes = [
            (name, tuple(tensor.shape), tensor.dtype) for name, tensor in self._tensors if not self._is_split(tensor)
        ]
        return repr((shapes, self.plain))

    def _is_split(self, tensor: torch.Tensor) -> bool:
        return bool(tensor.dim()) and tensor.shape[0] == self.num_examples and id(tensor) not in self._shared

    def _has_row_of_plain(self, value: Any) -> bool:
        if isinstance(value, Mapping):
            return any(map(self._has_row_of_plain, value.values()))
        if not isinstance(value, list | tuple):
            return False
        is_row = len(value) == self.num_examples and all(isinstance(each, _PLAIN) for each in value)
        return (is_row and bool(value)) or any(map(self._has_row_of_plain, value))


def _named(value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of an argument, each with what comes after the argument's name to say where it is."""
    if isinstance(value, Mapping):
        held: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | tuple):
        held = enumerate(value)
    elif (attributes := attributes_of(value)) is not None:
        held = attributes.items()
    else:
        yield "", value
        return
    for key, item in held:
        for path, leaf in _named(item):
            yield f"[{key!r}]{path}", leaf
