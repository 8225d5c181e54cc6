"""Where the rows lie in each storage of a run on fake tensors, or that they are mixed in it."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from tightfit.effects.independence.rows import Mixes, Pattern, RowLayout, pattern_of
from tightfit.effects.independence.totals import Total
from tightfit.effects.reads import line_of_code


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """State of a storage in which rows may be mixed. `is_vote`: whether it is the `all` or `any` of something per row."""

    reason: str
    is_vote: bool = False


class Uniform:
    """State of a storage whose elements are all equal, for any number of rows."""


UNIFORM = Uniform()
UNIFORM_SQUARE = Uniform()
"""The same where more than one of its dimensions have a size that depends on the number of rows."""
State = Pattern | Mixed | Total | Uniform


def key_of(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage, as long as it is alive."""
    return tensor.untyped_storage()._cdata


def at_line() -> str:
    """The line of the user's code that runs, as the end of a sentence."""
    line = line_of_code()
    return f" at {line}" if line else ""


def loss_state(index: int | None) -> Total:
    """The state of the loss number `index`, which is a mean; without a number, of a sum over rows."""
    means = frozenset[int]() if index is None else frozenset({index})
    return Total(means=means, reason=f"a loss is combined with something else{at_line()}")


class RowStates:
    """The state of each storage; one without a state is constant. `num_rows` is the number of rows of the run."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        # All inputs are kept, so that no storage is taken for another.
        self._kept: list[Any] = []
        self._states: dict[int, State] = {}
        # Of constants, the dimensions with as many elements as there are rows: expanded, or counting them.
        # Kept by tensor and not by storage: an expanded constant shares the storage of the one that is not.
        self._scaled: dict[int, tuple[torch.Tensor, tuple[int, ...], bool]] = {}
        self.counting: set[int] = set()
        """The storages of those that count them."""

    def state(self, tensor: torch.Tensor) -> State | None:
        """The state of a tensor's storage; None for a constant."""
        return self._states.get(key_of(tensor))

    def layout(self, tensor: torch.Tensor) -> RowLayout | None:
        """The layout of the rows in a tensor; None if it has none.

        Raises:
            Mixes: they are mixed in it.
        """
        state = self.state(tensor)
        if isinstance(state, Mixed | Total):
            raise Mixes(state.reason)
        if isinstance(state, Pattern):
            return state.layout_in(tensor)
        found = self._scaled.get(id(tensor))
        if found is not None and not found[2]:
            return RowLayout(dim=found[1][0])
        return None

    def is_uniform(self, tensor: torch.Tensor) -> bool:
        """Whether all its elements are equal."""
        return isinstance(self.state(tensor), Uniform)

    def counts_rows(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is 0, 1, 2, ... along the rows, and nobody has written to it."""
        found = self._scaled.get(id(tensor))
        return found is not None and found[2] and self.state(tensor) is None

    def is_scaled(self, tensor: torch.Tensor) -> bool:
        """Whether it is a constant that is repeated for each row, or counts them."""
        return id(tensor) in self._scaled

    def scale(self, tensor: torch.Tensor, dims: tuple[int, ...], *, counts: bool) -> None:
        """Notes a constant whose dimensions `dims` have an element per row: repeated, or with `counts` 0, 1, 2, ..."""
        self._scaled[id(tensor)] = tensor, dims, counts
        if counts:
            self.counting.add(key_of(tensor))

    def set(self, tensor: torch.Tensor, state: State) -> None:
        """Sets the state of a tensor's storage."""
        self._states[key_of(tensor)] = state

    def depends(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor may have other values, or another size, for other rows."""
        return self.state(tensor) is not None or id(tensor) in self._scaled

    def broadcast(self, tensors: Iterable[torch.Tensor], num_dims: int) -> RowLayout | None:
        """The layout of the rows in a pointwise result of `tensors` with `num_dims` dimensions.

        Raises:
            Mixes: in some they lie elsewhere, or something else varies along them.
        """
        tensors = [t for t in tensors if not self.is_uniform(t)]
        found: RowLayout | None = None
        for tensor in tensors:
            layout = self.layout(tensor)
            if layout is None:
                continue
            layout = layout.at(layout.dim + num_dims - tensor.dim())
            if found is not None and found != layout:
                raise Mixes("combines rows with other rows")
            found = layout
        if found is None:
            return None
        for tensor in tensors:
            dim = found.dim - (num_dims - tensor.dim())
            if self.layout(tensor) is None and dim >= 0 and tensor.shape[dim] != 1 and tensor.stride(dim) != 0:
                raise Mixes("combines rows with a tensor that varies along them")
        return found

    def put(self, tensor: torch.Tensor, layout: RowLayout) -> None:
        """Sets the layout of the rows in a tensor, such as an input."""
        self._kept.append((tensor, tensor.untyped_storage()))
        self._states[key_of(tensor)] = pattern_of(tensor, layout, self._num_rows)
