"""The arguments of a call as a batch of examples, and parts of it."""

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tightfit.effects.values.shared_memory import storage_of
from tightfit.errors import ApplyError

Instead = Callable[[torch.Tensor], torch.Tensor]


class AbstractBatch(abc.ABC):
    """The arguments of a call as a batch of examples."""

    def __init__(self, num_examples: int, device: torch.device) -> None:
        self.num_examples = num_examples
        self.device = device

    def parts(self, num_parts: int) -> Iterator[tuple[int, int]]:
        """The ranges of examples, all of one length except the last, which may be shorter."""
        # Rounded up: fewer, larger parts rather than one more part of a few examples.
        size = max(1, -(-self.num_examples // num_parts))
        for begin in range(0, self.num_examples, size):
            yield begin, min(self.num_examples, begin + size)

    def own_parts(self, num_parts: int) -> Iterator[tuple[int, int]]:
        """Those that are run here: all, but of a batch that is divided over ranks."""
        return self.parts(num_parts)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that are split."""
        found: list[torch.Tensor] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            found.append(tensor)
            return tensor

        self.part(0, self.num_examples, note)
        return found

    def rest_key(self) -> Any:
        """What a proof goes by that `part` leaves as it is within containers, which by itself are known by their types alone."""
        return ()

    @abc.abstractmethod
    def part(self, begin: int, end: int, instead: Instead | None = None) -> tuple[Sequence[Any], dict[str, Any]]:
        """The arguments for the examples in `range(begin, end)`; with `instead`, its result for each tensor that is split."""


def check_rows(what: str, tensor: torch.Tensor) -> None:
    """Checks that a tensor can be split along its first dimension.

    Raises:
        ApplyError: it cannot.
    """
    if tensor.is_nested or tensor.layout is not torch.strided:
        raise ApplyError(
            f"{what} is a {'nested' if tensor.is_nested else 'sparse'} tensor, which micro_batches cannot split; "
            "leave micro_batches out"
        )


def whole_argument(output: torch.Tensor, part: tuple[int, int], batch: AbstractBatch) -> torch.Tensor | None:
    """The argument of a model of which its output is the rows of this part as they are; None for others."""
    if output.requires_grad or output.layout is not torch.strided:
        return None
    for argument in batch.tensors():
        rows = argument[part[0] : part[1]]
        is_same = storage_of(rows) == storage_of(output) and rows.storage_offset() == output.storage_offset()
        if is_same and (rows.shape, rows.stride(), rows.dtype) == (output.shape, output.stride(), output.dtype):
            return argument.detach() if argument.requires_grad else argument
    return None


class Batch(AbstractBatch):
    """The arguments of a model: tensors whose first dimension is that of the first tensor are split, those of length one are shared.

    Raises:
        ApplyError: it is not clear how to split them, or there is nothing to split.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._args, self._kwargs = args, kwargs
        named = {str(name): value for name, value in (*enumerate(args), *kwargs.items()) if value is not None}
        tensors = {n: v for n, v in named.items() if isinstance(v, torch.Tensor) and v.dim()}
        if not tensors:
            raise ApplyError("the model is called without a tensor that could be split; leave micro_batches out")
        for name, value in tensors.items():
            check_rows(f"argument {name}", value)
        first = next(iter(tensors.values()))
        super().__init__(int(first.shape[0]), first.device)
        for name, value in named.items():
            if isinstance(value, torch.Tensor):
                # The parts' backward passes are limited to parameters (`inputs=`), so a batch that is trained
                # itself (adversarial examples) would get no gradient.
                if value.requires_grad:
                    raise ApplyError(
                        f"argument {name} requires a gradient, which micro_batches does not compute; leave it out"
                    )
                # A first dimension of one is shared by all examples, as the position ids and masks of Hugging
                # Face models are. Vectors of another length (class weights) are shared too.
                if value.dim() > 1 and value.shape[0] not in (1, self.num_examples):
                    raise ApplyError(
                        f"argument {name} has {value.shape[0]} rows where the batch has {self.num_examples}, so "
                        "micro_batches cannot split it; leave micro_batches out"
                    )
            elif not isinstance(value, bool | int | float | str | torch.dtype | torch.device):
                raise ApplyError(
                    f"argument {name} is a {type(value).__name__}, which micro_batches cannot split; leave "
                    "micro_batches out"
                )

    def part(self, begin: int, end: int, instead: Instead | None = None) -> tuple[list[Any], dict[str, Any]]:
        """The arguments for the examples in `range(begin, end)`; with `instead`, its result for each tensor that is split."""

        def cut(value: Any) -> Any:
            if not (isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == self.num_examples):
                return value
            return value[begin:end] if instead is None else instead(value)

        return [cut(value) for value in self._args], {name: cut(value) for name, value in self._kwargs.items()}
