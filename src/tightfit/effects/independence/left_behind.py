"""Side effects of a proof's run on the state of a module, and whether they are independent of the rows it was given.

A table that is made in the first call is independent; a mean of the first batch, the first loss, or the size of the first part is not, and
would be computed from one part alone.
"""

import dataclasses
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from tightfit.effects.holders import PLAIN
from tightfit.effects.independence.left_tensors import LeftTensor, attributes_of_fakes, left_tensors, signature_of
from tightfit.effects.independence.row_flow import Flow
from tightfit.effects.random_states import numpy_state
from tightfit.effects.state import DRAWN, Snapshot, StateDifference, differences
from tightfit.effects.users_code import is_users_class

# Code, and names of things: nothing that is computed.
_FIXED = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, types.ModuleType, torch.dtype)


@dataclasses.dataclass(slots=True)
class Left:
    """The changes of one run: `found` in words, `filled` the caches that were filled, and the new `values` by path."""

    found: list[StateDifference] = dataclasses.field(default_factory=list)
    filled: list[str] = dataclasses.field(default_factory=list)
    values: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    tensors: list[LeftTensor] = dataclasses.field(default_factory=list)
    after: Snapshot | None = None
    # That the code could reach before the run, in the same order for each run.
    tensors_before: Sequence[torch.Tensor] = ()

    def take(self, before: Snapshot, after: Snapshot) -> None:
        """Collects the differences."""
        self.found = differences(before, after)
        self.tensors = list(left_tensors(before, after)) if self.found else []
        fakes = attributes_of_fakes(self.tensors)
        self.values = list(_values(before, after, fakes)) if self.found else []
        self.after = after if any(each.what == DRAWN for each in self.found) else None

    def is_of_draws(self) -> bool:
        """Whether nothing has changed but generators, which can be put back."""
        return not self.filled and all(each.what == DRAWN and not each.is_in_place for each in self.found)

    def is_steady(self) -> bool:
        """Whether nothing has changed but tensors that came where there were such before: the next run begins as this one did."""
        num_values = sum(max(1, len(tree_leaves(value))) for _, value in self.values)
        is_all = not self.filled and num_values == len(self.tensors)
        is_alike = all(each.was == signature_of(each.tensor) for each in self.tensors)
        return is_all and is_alike and not any(each.is_in_place for each in self.found)

    def __str__(self) -> str:
        return next((str(each) for each in (*self.found, *self.filled)), "")


def _values(before: Snapshot, after: Snapshot, fakes: set[int]) -> Iterator[tuple[str, Any]]:
    earlier = {holder.key: content for holder, content in zip(before.reach.holders, before.contents, strict=True)}
    for holder, content in zip(after.reach.holders, after.contents, strict=True):
        first = earlier.get(holder.key)
        if holder.key in fakes or (first is not None and holder.same(first, content)):
            continue
        if not isinstance(content, dict):
            yield holder.path, list(content)
            continue
        for name, value in content.items():
            is_same = isinstance(first, dict) and name in first and first[name] is value
            if not is_same:
                yield f"{holder.path}.{name}", value


def depends_on_rows(flow: Flow, lefts: Sequence[Left], *, joins_left: bool) -> str:
    """A side effect that may depend on the rows, in words, or nothing. The last of `lefts` belongs to `flow`. Where parts of the rows are put together, `joins_left`, it may be a tensor."""
    last = lefts[-1]
    for found in last.found:
        # What is written in place (a running mean) is written again by each part, whatever the values are.
        if found.is_in_place:
            return str(found)
    if any(left.after is not None for left in lefts) and not _drew_alike(lefts):
        drawn = next(each for left in lefts for each in left.found if each.what == DRAWN)
        return f"{drawn}, as often as there are rows,"
    for left in lefts:
        if [path for path, _ in left.values] != [path for path, _ in last.values]:
            return f"{left or last}, for some numbers of rows,"
    for values in zip(*(left.values for left in lefts), strict=True):
        leaves = [tree_leaves(value) for _, value in values]
        if len({len(each) for each in leaves}) != 1 or not all(
            _is_same(flow, each) or (joins_left and _are_left(lefts, each)) for each in zip(*leaves, strict=True)
        ):
            return f"{values[-1][0]} was made of the rows"
    return ""


def _are_left(lefts: Sequence[Left], values: Sequence[Any]) -> bool:
    return all(any(each.tensor is value for each in left.tensors) for left, value in zip(lefts, values, strict=True))


def _drew_alike(lefts: Sequence[Left]) -> bool:
    """Whether all runs, which have begun with the same generators, have ended with the same."""
    after = [left.after for left in lefts]
    if any(each is None for each in after):
        return False
    first, *others = [each for each in after if each is not None]
    return all(
        other.python_random == first.python_random
        and numpy_state.same(other.numpy_random, first.numpy_random)
        and other.drawn == first.drawn
        for other in others
    )


def _is_same(flow: Flow, values: Sequence[Any]) -> bool:
    """Whether a value is the same in all runs; the last one belongs to `flow`."""
    last = values[-1]
    if any(type(value) is not type(last) for value in values):
        return False
    if isinstance(last, torch.Tensor):
        return _is_same_tensor(flow, values)
    if isinstance(last, PLAIN):
        return all(value == last or (value != value and last != last) for value in values)  # noqa: PLR0124 - not a number
    # An object of the program's is a holder of its own, whose contents are compared; one of a library's says nothing.
    is_known = isinstance(last, (*_FIXED, torch.device, torch.Generator, torch.nn.Module))
    return is_known or is_users_class(type(last))


def _is_same_tensor(flow: Flow, values: Sequence[torch.Tensor]) -> bool:
    last = values[-1]
    if flow.rows.depends(last) or any(value.shape != last.shape or value.dtype != last.dtype for value in values):
        return False
    return isinstance(last, FakeTensor) or all(torch.equal(value, last) for value in values)
