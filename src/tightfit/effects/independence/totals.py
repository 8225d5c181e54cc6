"""Sums and means over all rows, and linear functions of them: such a loss can be combined from the losses of micro-batches.

The mean of a batch is the mean of its parts' means, each weighted by its share; so is any linear function of means, constants included, as the
shares add up to one. A sum is the sum of the parts' sums, and so is a linear function of sums without constants. Divided by the number of rows,
it is a mean. Only values that depend on no row may be factors.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tightfit.effects.independence.operations import operation_of
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """State of a storage whose elements are linear in means over rows, or in sums.

    `means` are the weights for averaging the results of parts: the numbers of losses, each a mean over its own number of terms, or `ROWS`. If there
    is more than one, they must agree. Without any it is a sum. `reason` says where rows were combined.
    """

    means: frozenset[int]
    reason: str = dataclasses.field(default="", compare=False)


def is_sum(state: Any) -> bool:
    """Whether a state is a sum over rows."""
    return isinstance(state, Total) and not state.means


def divides_by_rows(flow: "Flow", call: "OperatorCall") -> bool:
    """Whether the current operator divides by a number that depends on the number of rows."""
    if call.name != "div":
        return False
    return list(operation_of(call.func, call.arguments, call.outputs).sizes) != list(flow.its_sizes())


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
    return Total(means=means, reason=f"{call.func} works along the rows{f' at {line}' if line else ''}")


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
        return dataclasses.replace(first, means=frozenset({ROWS}))
    # An in-place operator may keep part of the former contents.
    stays = call.func._schema.is_mutable and not isinstance(flow.rows.state(call["self"]), Total)
    has_constants = stays or (bool(constants) and call.name in _ADDS | _TOGETHER)
    # A constant added to a sum would be added once for each part.
    if any(not each.means for each in totals) and (has_constants or any(each.means for each in totals)):
        raise Mixes(first.reason)
    return dataclasses.replace(first, means=frozenset().union(*(each.means for each in totals)))
