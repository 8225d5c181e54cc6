"""Rows through every operator: what `row_flow` says of their independence, against numbers.

Each dimension of the first tensor is taken for the rows, with each way for the other tensors to have as many. Where the proof holds, the result of parts must be
the parts of the result; where it does not although parts are right, it is a refusal without need, or a coincidence.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.operators.listed import REFUSALS, Call, calls, operators, tensors_of
from tightfit.effects.independence.row_flow import NeedsValues
from tightfit.effects.independence.row_proof import Computation, FollowedRun, prove
from tightfit.effects.independence.rows import Mixes, RowLayout

_NUM_CALLS, _LEAST_ROWS, _PART, _MOST_WAYS = 40, 3, 2, 6
_SECONDS = 60
Row = tuple[str, str, str, str]


def found(name: str) -> list[Row]:
    """For each way: the name, `right`, `wrong`, `refused` or `mixes` (refused, and parts are not right), why, and the shapes."""
    operator = dict(operators())[name]
    rows = []
    for call in calls(name, operator, _NUM_CALLS):
        if not call.tensors:
            continue
        for dims in _ways(call.tensors):
            row = _tried(call, dims)
            if row is not None:
                rows.append((name, *row, f"{[tuple(t.shape) for t in call.tensors]} {dims}"))
    return rows


def _ways(tensors: Sequence[torch.Tensor]) -> list[list[int | None]]:
    ways: list[list[int | None]] = []
    for dim, size in enumerate(tensors[0].shape):
        if size >= _LEAST_ROWS:
            others = [[None, *(d for d, s in enumerate(t.shape) if s == size)] for t in tensors[1:]]
            ways += [[dim, *rest] for rest in itertools.islice(itertools.product(*others), _MOST_WAYS)]
    return ways


def _tried(call: Call, dims: Sequence[int | None]) -> tuple[str, str] | None:
    tensors = [t.detach() for t in call.tensors]
    num_rows = tensors[0].shape[dims[0] or 0]
    with torch.no_grad():
        try:
            whole, again = (tensors_of(call.run([t.clone() for t in tensors])) for _ in range(2))
        except REFUSALS:
            return None
        if not whole or not all(map(_are_close, whole, again)):
            return None
    subject = Computation(call=call.run, inputs=tensors, dims=dims, module=torch.nn.Module())
    try:
        proof = prove(subject, num_rows, [_PART, num_rows - _PART])
        layouts = [_layout(proof, result) for result in tensors_of(proof.result)]
    except (Mixes, NeedsValues) as error:
        return "refused" if _is_independent(call, tensors, dims, num_rows, whole) else "mixes", str(error)
    why = _difference(call, tensors, dims, num_rows, whole, layouts)
    return ("wrong", why) if why else ("right", "")


def _layout(proof: FollowedRun, result: torch.Tensor) -> RowLayout | None:
    return None if proof.flow.rows.is_uniform(result) else proof.flow.rows.layout(result)


def _parts(
    call: Call, tensors: Sequence[torch.Tensor], dims: Sequence[int | None], num_rows: int
) -> list[tuple[slice, list[torch.Tensor]]]:
    parts = []
    for begin, end in ((0, _PART), (_PART, num_rows)):
        given = [
            t if d is None else t.narrow(d, begin, end - begin).contiguous() for t, d in zip(tensors, dims, strict=True)
        ]
        with torch.no_grad():
            parts.append((slice(begin, end), tensors_of(call.run(given))))
    return parts


def _difference(
    call: Call,
    tensors: Sequence[torch.Tensor],
    dims: Sequence[int | None],
    num_rows: int,
    whole: Sequence[torch.Tensor],
    layouts: Sequence[RowLayout | None],
) -> str:
    try:
        parts = _parts(call, tensors, dims, num_rows)
    except REFUSALS as error:
        return f"a part ends with {type(error).__name__}: {error}"
    for rows, results in parts:
        for result, part, layout in zip(whole, results, layouts, strict=True):
            if layout is not None and not _are_close(_part_of(result, layout, num_rows, rows), part):
                return f"{layout} of {tuple(result.shape)}, and a part is {tuple(part.shape)}"
    return ""


def _part_of(result: torch.Tensor, layout: RowLayout, num_rows: int, rows: slice) -> torch.Tensor:
    apart = result.unflatten(layout.dim, (layout.outer, num_rows, layout.inner))
    return apart.movedim(layout.dim + 1, 0)[rows].movedim(0, layout.dim + 1).flatten(layout.dim, layout.dim + 2)


def _is_independent(
    call: Call,
    tensors: Sequence[torch.Tensor],
    dims: Sequence[int | None],
    num_rows: int,
    whole: Sequence[torch.Tensor],
) -> bool:
    try:
        (_, first), (_, second) = _parts(call, tensors, dims, num_rows)
        joined = [[torch.cat([a, b], d) for d in range(max(1, a.dim()))] for a, b in zip(first, second, strict=True)]
    except REFUSALS:
        return False
    return all(any(_are_close(one, result) for one in ways) for ways, result in zip(joined, whole, strict=True))


def _are_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype) or one.layout is not torch.strided:
        return False
    return (
        torch.allclose(one, other, rtol=1e-4, atol=1e-5, equal_nan=True) if _is_real(one) else torch.equal(one, other)
    )


def _is_real(tensor: torch.Tensor) -> Any:
    return tensor.is_floating_point() or tensor.is_complex()
