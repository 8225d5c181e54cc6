"""The heads of a block's attention, as far as its operators show them: tensor parallelism divides whole heads.

Attention is as many products as there are sequences and heads, with a row for each query; all queries of one head are as many as the tokens, which the block's own products have as rows. The products
before it give queries, keys and values: what is beside the queries are two widths for each key-value head. Where keys are repeated for groups of heads, attention itself does not show that.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from tightfit.layouts.model.product_sizes import ProductSizes
from tightfit.tape import Column

_ROWS = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Heads of queries, and of keys and values; 0 where they cannot be told."""

    number: int = 0
    key_value: int = 0

    def are_divided_by(self, degree: int) -> bool:
        """Whether each of `degree` ranks has as many; so it is of heads that are not known."""
        return self.number % degree == 0 and self.key_value % degree == 0


def heads_of(sizes: ProductSizes, is_attention: Column) -> Heads:
    """The heads of a block whose forward pass has products of these sizes; `is_attention` is of its operators."""
    table = sizes.table
    is_fused = is_attention[table.operator]
    own = np.flatnonzero((table.batch == 1) & (table.taps == 0) & (sizes.of_tokens == _ROWS) & ~is_fused)
    found = np.flatnonzero(is_fused)
    if not len(found):
        found = np.flatnonzero((table.batch > 1) & (table.taps == 0) & (table.num_rows == table.num_columns))
    if not (len(own) and len(found)):
        return Heads()
    tokens = _most_frequent(table.num_rows[own])
    queries = table.batch[found] * table.num_rows[found]
    if (queries % tokens).any():
        return Heads()
    number = math.gcd(*(queries // tokens).tolist())
    first = int(found[0])
    before = own[(own < first) & (table.num_rows[own] == tokens)]
    # Of products that are not fused the first has the keys as columns, and the width of a head as depth, as fused attention has it.
    width = int(table.depth[first])
    others, rest = divmod(int(table.num_columns[before].sum()) - number * width, 2 * width)
    is_told = not rest and others > 0 and number % others == 0
    return Heads(number=number, key_value=others if is_told else 0)


def heads_words(of_blocks: Sequence[Heads]) -> str:
    """What is known of the degree of tensor parallelism, in words."""
    if not all(heads.number for heads in of_blocks):
        return "tensor parallelism divides every block: its degree has to divide the heads and the key-value heads, which the trace does not show"
    numbers = _numbers({heads.number for heads in of_blocks})
    if not all(heads.key_value for heads in of_blocks):
        return f"tensor parallelism divides every block: its degree divides the {numbers} heads, and has to divide the key-value heads, which the trace does not show"
    others = _numbers({heads.key_value for heads in of_blocks})
    also = "" if others == numbers else f" and the {others} key-value heads"
    return f"tensor parallelism divides every block: only degrees that divide its {numbers} heads{also} are considered"


def _numbers(found: set[int]) -> str:
    return " or ".join(map(str, sorted(found)))


def _most_frequent(numbers: Column) -> int:
    values, counts = np.unique(numbers, return_counts=True)
    return int(values[counts.argmax()])
