"""Rules of `row_flow` for indexing, gathering and scattering."""

from collections.abc import Sequence

import torch

from tightfit.effects.independence.row_flow import Flow, OperatorCall, Result
from tightfit.effects.independence.rows import Mixes, RowLayout
from tightfit.effects.independence.rules import only, rule


@rule("gather scatter scatter_add scatter_reduce take_along_dim")
def gather(flow: Flow, call: OperatorCall) -> Result:
    """Gathers or scatters along another dimension than the rows', with all arguments row by row."""
    dim = call["dim"] % call["self"].dim()
    tensors = [t for t in call.tensors if t.dim()]
    sized = [t for t in tensors if not flow.rows.is_uniform(t)]
    found = {flow.rows.layout(t) for t in sized}
    layout = next((each for each in found if each is not None), None)
    if layout is None or found != {layout} or layout.dim == dim:
        raise Mixes("gathers from other rows")
    if any(t.shape[layout.dim] != call.outputs[0].shape[layout.dim] for t in tensors):
        raise Mixes("drops rows")
    return layout


@rule("index_select")
def select(flow: Flow, call: OperatorCall) -> Result:
    """Selects along another dimension than the rows', or looks rows up in a shared table."""
    table, index, dim = call["self"], call["index"], call["dim"] % max(1, call["self"].dim())
    mine, its = flow.rows.layout(table), flow.rows.layout(index)
    if any(map(flow.rows.is_uniform, (table, index))) or flow.rows.counts_rows(index):
        raise Mixes("indexes with or into a tensor sized by the number of rows")
    if mine is None and its is not None:
        return its.at(dim)
    if mine is None or its is not None or mine.dim == dim:
        raise Mixes("gathers from other rows")
    return mine


def indexed(flow: Flow, subject: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> tuple[RowLayout, int]:
    """The layout of the rows in `subject[indices]`, and its number of dimensions.

    Raises:
        Mixes: rows are looked up among others, or values decide how many there are.
    """
    given = {dim: index for dim, index in enumerate(indices) if index is not None}
    if any(index.dtype in (torch.bool, torch.uint8) for index in given.values()):
        raise Mixes("has a size that depends on values")
    if any(map(flow.rows.is_uniform, (subject, *given.values()))) or flow.rows.counts_rows(subject):
        raise Mixes("indexes with or into a tensor sized by the number of rows")
    num_index = max(index.dim() for index in given.values())
    dims = sorted(given)
    # Advanced indexing puts the indexed dimensions where the first of them was if they are neighbours, and in
    # front otherwise (NumPy's rule, which torch follows).
    is_together = dims == list(range(dims[0], dims[-1] + 1))
    place = dims[0] if is_together else 0
    num_dims = subject.dim() - len(given) + num_index
    # `x[torch.arange(n), y]` takes one position of each row: position numbers of the rows index their own
    # dimension.
    counting = {dim: index for dim, index in given.items() if flow.rows.counts_rows(index)}
    rows = flow.rows.layout(subject)
    of_index = flow.rows.broadcast([i for d, i in given.items() if d not in counting], num_index)
    if not counting:
        if rows is None and of_index is not None:
            return of_index.at(place + of_index.dim), num_dims
        if rows is None or of_index is not None or rows.dim in given:
            raise Mixes("gathers from other rows")
        before = sum(dim < rows.dim for dim in given)
        at = rows.dim - before + (num_index if place <= rows.dim - before else 0)
        return rows.at(at), num_dims
    ((dim, count),) = counting.items() if len(counting) == 1 else ((-1, next(iter(counting.values()))),)
    own = next(d for d, size in enumerate(count.shape) if size == count.numel())
    layout = RowLayout(dim=own + num_index - count.dim())
    if rows != RowLayout(dim=dim) or (of_index is not None and of_index != layout):
        raise Mixes("gathers from other rows")
    for index in given.values():
        at = layout.dim - (num_index - index.dim())
        if index is not count and of_index is None and at >= 0 and index.shape[at] != 1:
            raise Mixes("gathers rows by an index that varies along them")
    return layout.at(place + layout.dim), num_dims


@rule("index _unsafe_index")
def index(flow: Flow, call: OperatorCall) -> Result:
    """Indexes other dimensions than the rows', a shared table by rows, or each row by its own number."""
    return indexed(flow, call["self"], call["indices"])[0]


@rule("index_put _index_put_impl _unsafe_index_put")
def index_put(flow: Flow, call: OperatorCall) -> Result:
    """Writes to the elements that `index` would return."""
    layout, num_dims = indexed(flow, call["self"], call["indices"])
    rows, values = flow.rows.layout(call["self"]), call["values"]
    if rows is None:
        raise Mixes("writes rows into a tensor that they share")
    along = flow.rows.broadcast([values], num_dims)
    dim = layout.dim - (num_dims - values.dim())
    if along != layout if along is not None else dim >= 0 and values.shape[dim] != 1 and values.stride(dim) != 0:
        raise Mixes("overwrites other rows")
    return rows


@rule("searchsorted")
def search(flow: Flow, call: OperatorCall) -> Result:
    """Searches in one table for all rows, or in each row's own."""
    table, values = call["sorted_sequence"], call["self"]
    if not isinstance(values, torch.Tensor):
        raise Mixes("gathers from other rows")
    mine, its = flow.rows.layout(table), flow.rows.layout(values)
    if its is None or (mine is None and table.dim() != 1) or (mine is not None and mine != its):
        raise Mixes("gathers from other rows")
    if mine is not None and mine.dim == table.dim() - 1:
        raise Mixes("gathers from other rows")
    return its


@rule("bucketize")
def bucketize(flow: Flow, call: OperatorCall) -> Result:
    """Looks each element up in one table for all rows."""
    only(flow, call, "self")
    if flow.rows.counts_rows(call["boundaries"]):
        raise Mixes("indexes with or into a tensor sized by the number of rows")
    return flow.rows.layout(call["self"])


@rule("isin")
def isin(flow: Flow, call: OperatorCall) -> Result:
    """Tests each element against one set for all rows."""
    only(flow, call, "elements")
    return flow.rows.layout(call["elements"])


@rule("index_fill")
def index_fill(flow: Flow, call: OperatorCall) -> Result:
    """Writes one number to what `index` would give; torch 2.15 makes this of `x[torch.arange(len(x)), 0] = 0`."""
    rows, dim = flow.rows.layout(call["self"]), call["dim"] % call["self"].dim()
    if rows is None or (isinstance(call["value"], torch.Tensor) and flow.rows.layout(call["value"]) is not None):
        raise Mixes("overwrites other rows")
    indexed(flow, call["self"], [*[None] * dim, call["index"]])
    return rows


@rule("index_add index_copy")
def write_along(flow: Flow, call: OperatorCall) -> Result:
    """Writes along another dimension, at the same positions for all rows."""
    layout, dim = flow.rows.layout(call["self"]), call["dim"] % call["self"].dim()
    source = call.get("source")
    if layout is None or layout.dim == dim or flow.rows.layout(call["index"]) is not None:
        raise Mixes("overwrites other rows")
    if isinstance(source, torch.Tensor) and flow.rows.layout(source) != layout and source.shape[layout.dim] != 1:
        raise Mixes("overwrites other rows")
    return layout
