"""The sizes of the products of a part (`tightfit.tape.Geometry`), and what they are for a share of the tokens and of the weights.

One of a product's dimensions is the tokens, another is cut by tensor parallelism. A product of activations and a weight has the weight's bytes as two of its
dimensions: the third is the tokens. The gradient of a weight sums over the tokens: its depth. Products without a weight (attention that is not fused) and fused
attention are as many as there are sequences and heads. Experts have a share of the tokens each. Of a weight the longer side is cut: columns of what widens, rows of what narrows again.
"""

import dataclasses

import numpy as np

from tightfit.layouts.model.experts_of_tape import GROUPED
from tightfit.tape import Column, Geometry, Tape

_BATCH, _ROWS, _COLUMNS, _DEPTH = range(4)
_ITEM_BYTES = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProductSizes:
    """Sizes of n products of one pass; `table.operator` are places among its operators. `of_tokens` and `of_weights` name the dimension that is the tokens, and
    the one that tensor parallelism cuts: 0 to 3 for batch, rows, columns, depth, shape `(n,)`."""

    table: Geometry
    of_tokens: Column
    of_weights: Column

    def scaled(self, share: float, tp: int, first: int) -> Geometry:
        """The sizes for `share` of the tokens and 1/`tp` of the weights; operators are counted from `first`."""
        sizes = _sizes(self.table).astype(np.float64)
        at = np.arange(len(self.table))
        sizes[at, self.of_tokens] *= share
        sizes[at, self.of_weights] /= tp
        return self._replaced(np.maximum(1, np.rint(sizes)).astype(np.int64), self.table.operator + first)

    def with_longer_sequences(self, is_attention: Column, factor: float) -> "ProductSizes":
        """The same tokens in fewer sequences, each `factor` times as long; `is_attention` is of the operators."""
        sizes = _sizes(self.table).astype(np.float64)
        sizes[is_attention[self.table.operator]] *= (1 / factor, factor, factor, 1)
        table = self._replaced(np.maximum(1, np.rint(sizes)).astype(np.int64), self.table.operator)
        return dataclasses.replace(self, table=table)

    def _replaced(self, sizes: Column, operator: Column) -> Geometry:
        return dataclasses.replace(
            self.table,
            operator=operator.astype(self.table.operator.dtype),
            batch=sizes[:, _BATCH],
            num_rows=sizes[:, _ROWS],
            num_columns=sizes[:, _COLUMNS],
            depth=sizes[:, _DEPTH],
        )


def product_sizes(
    tape: Tape, chosen: Column, *, is_attention: Column, fixed_read: Column, fixed_written: Column
) -> ProductSizes:
    """The sizes of the products among the operators `chosen`, ascending. The bytes of weights that each reads and writes tell its dimensions apart."""
    rows = np.flatnonzero(np.isin(tape.geometry.operator, chosen))
    table = tape.geometry.rows(rows)
    place = np.searchsorted(chosen, table.operator)
    is_grouped = np.array([GROUPED in tape.strings[name] for name in tape.operators.name[chosen].tolist()], dtype=bool)
    table = dataclasses.replace(table, operator=place.astype(table.operator.dtype))
    of_tokens, of_weights = np.full(len(rows), _BATCH), np.full(len(rows), _BATCH)
    for i, (batch, num_rows, columns, depth) in enumerate(_sizes(table).tolist()):
        at = int(place[i])
        if is_attention[at] or (batch > 1 and not is_grouped[at]):
            continue
        if table.taps[i]:
            of_tokens[i], of_weights[i] = _ROWS, _COLUMNS
        elif fixed_written[at]:
            of_tokens[i], of_weights[i] = _DEPTH, _longer(_ROWS, num_rows, _COLUMNS, columns)
        elif (
            not is_grouped[at]
            and _is_bytes_of(fixed_read[at], num_rows * depth)
            and not _is_bytes_of(fixed_read[at], depth * columns)
        ):
            of_tokens[i], of_weights[i] = _COLUMNS, _longer(_ROWS, num_rows, _DEPTH, depth)
        else:
            of_tokens[i], of_weights[i] = _ROWS, _longer(_COLUMNS, columns, _DEPTH, depth)
    return ProductSizes(table=table, of_tokens=of_tokens, of_weights=of_weights)


def _sizes(table: Geometry) -> Column:
    return np.stack([table.batch, table.num_rows, table.num_columns, table.depth], axis=1)


def _is_bytes_of(num_bytes: float, elements: int) -> bool:
    return any(num_bytes == elements * item for item in _ITEM_BYTES)


def _longer(first: int, length: int, second: int, other: int) -> int:
    return first if length >= other else second
