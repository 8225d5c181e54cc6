"""Sums and means over all rows, and linear functions of them: such a loss can be combined from the losses of micro-batches.

The mean of a batch is the mean of its parts' means, each weighted by its share; so is any linear function of means, constants included, as the
shares add up to one. A sum is the sum of the parts' sums, and so is a linear function of sums without constants. Divided by the number of rows,
it is a mean. Only values that depend on no row may be factors.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tightfit.effects.independence.operations import COMPARISONS, operation_of
from tightfit.effects.independence.rows import Mixes, Pattern
from tightfit.effects.reads import line_of_code

if TYPE_CHECKING:
    from tightfit.effects.independence.row_flow import Flow, OperatorCall

ROWS = -1
"""Among the `means` of a `Total`: the mean over rows, each of which counts as much."""

# Operators that are linear in their one argument; in each of the tensors that they combine; in their summands.
_OF_ONE = frozenset(["neg", "positive", "clone", "_to_copy", "sum", "mean"])
_TOGETHER = frozenset(["stack", "cat"])
_ADDS = frozenset(["add", "sub", "rsub", "copy"])
# With the number of all, and with zero.
_WITH_ALL, _WITH_NONE = frozenset(["eq", "ne", "lt", "ge"]), frozenset(["eq", "ne", "gt", "le"])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """State of a storage whose elements are linear in means over rows, or in sums.

    `means` are the weights for averaging the results of parts: the numbers of losses, each a mean over its own number of terms, or `ROWS`. If there
    is more than one, they must agree. Without any it is a sum. `reason` says where rows were combined. `num_truths`: of how many truth values it is the count. `has_constants`: what is no mean was added.
    """

    means: frozenset[int]
    reason: str = dataclasses.field(default="", compare=False)
    num_truths: int = dataclasses.field(default=0, compare=False)
    has_constants: bool = dataclasses.field(default=False, compare=False)


def is_sum(state: Any) -> bool:
    """Whether a state is a sum over rows."""
    return isinstance(state, Total) and not state.means


def divides_by_rows(flow: "Flow", call: "OperatorCall") -> bool:
    """Whether the current operator divides by a number that depends on the number of rows."""
    return call.name == "div" and _has_other_sizes(flow, call)


def compares_with_rows(flow: "Flow", call: "OperatorCall") -> bool:
    """The same for a comparison."""
    return call.name in COMPARISONS and _has_other_sizes(flow, call)


def _has_other_sizes(flow: "Flow", call: "OperatorCall") -> bool:
    return list(operation_of(call.func, call.arguments, call.outputs).sizes) != list(flow.its_sizes())


def is_vote(flow: "Flow", call: "OperatorCall") -> bool:
    """Whether an operator asks of truth values whether all or none of them hold, by their count: `mask.sum() == mask.numel()`."""
    if call.name not in COMPARISONS:
        return False
    state, other = flow.rows.state(call["self"]), call.get("other")
    if not isinstance(state, Total) or not state.num_truths or isinstance(other, bool | torch.Tensor):
        return False
    if not other:
        return call.name in _WITH_NONE
    # As many as there are, for any number of rows.
    of_part = [size * flow.num_rows for size in flow.its_sizes()]
    return call.name in _WITH_ALL and other == state.num_truths and of_part == [other * flow.other.num_rows]


def total_of(flow: "Flow", call: "OperatorCall") -> Total | None:
    """The state of a linear function of sums or means over rows; None if the operator's result is none.

    Raises:
        Mixes: it has such an argument, and is not linear in it.
    """
    tensors = call.tensors
    totals = [state for t in tensors if isinstance(state := flow.rows.state(t), Total)]
    if not totals:
        return _of_rows(flow, call)
    constants = [t for t in tensors if not isinstance(flow.rows.state(t), Total)]
    is_known = call.func.namespace == "aten" and not any(map(flow.rows.depends, constants))
    has_grown = any(flow.grown(number, output) for number, output in enumerate(call.outputs))
    is_floating = all(output.is_floating_point() for output in call.outputs)
    if not is_known or has_grown or not is_floating or not _is_linear(flow, call, len(totals)):
        raise Mixes(totals[0].reason)
    if call.name in _ADDS:
        other = call.get("other")
        constants += [other] if isinstance(other, int | float) and other else []
    return _together(flow, call, totals, constants)


def _of_rows(flow: "Flow", call: "OperatorCall") -> Total | None:
    """A sum or mean over a dimension that includes the rows."""
    if call.name not in ("sum", "mean") or not isinstance(flow.rows.state(call["self"]), Pattern):
        return None
    tensor = call["self"]
    layout, dims = flow.rows.layout(tensor), call.get("dim")
    assert layout is not None
    dims = [dims] if isinstance(dims, int) else dims
    if dims and layout.dim not in [dim % tensor.dim() for dim in dims]:
        return None
    if any(flow.grown(number, output) for number, output in enumerate(call.outputs)):
        raise Mixes("works along the rows")
    line = line_of_code()
    means = frozenset({ROWS}) if call.name == "mean" else frozenset[int]()
    is_count = tensor.dtype == torch.bool and not call.outputs[0].dim()
    reason = f"{call.func} works along the rows{f' at {line}' if line else ''}"
    return Total(means=means, reason=reason, num_truths=tensor.numel() if is_count else 0)


def _is_linear(flow: "Flow", call: "OperatorCall", num_totals: int) -> bool:
    name = call.name
    if name == "mul":
        return num_totals == 1
    if name == "div":
        return (
            num_totals == 1 and isinstance(flow.rows.state(call["self"]), Total) and call.get("rounding_mode") is None
        )
    return name in _OF_ONE or name in _TOGETHER or name in _ADDS


def _together(flow: "Flow", call: "OperatorCall", totals: Sequence[Total], constants: Sequence[Any]) -> Total:
    first = totals[0]
    if call.name == "div" and divides_by_rows(flow, call):
        return dataclasses.replace(first, means=frozenset({ROWS}), num_truths=0)
    # An in-place operator may keep part of the former contents.
    stays = call.func._schema.is_mutable and not isinstance(flow.rows.state(call["self"]), Total)
    has_constants = stays or (bool(constants) and call.name in _ADDS | _TOGETHER)
    # A constant added to a sum would be added once for each part.
    if any(not each.means for each in totals) and (has_constants or any(each.means for each in totals)):
        raise Mixes(first.reason)
    return dataclasses.replace(
        first,
        means=frozenset().union(*(each.means for each in totals)),
        num_truths=0,
        has_constants=has_constants or any(each.has_constants for each in totals),
    )
