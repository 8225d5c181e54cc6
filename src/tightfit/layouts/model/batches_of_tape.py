"""How many tokens and examples a traced micro-batch has, as far as its operators show it."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tightfit.cost.classes import operator_class
from tightfit.layouts.model.weights_of_tape import WeightsOfTape
from tightfit.tape import Column, Phase, Tape

_INDEX_BYTES = (8, 4)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchOfTape:
    """`num_tokens` of one micro-batch in sequences of `sequence_length`; 0 where a workload has no tokens. `num_examples` is 0 where it is not known."""

    num_tokens: int
    sequence_length: int
    num_examples: int


def batch_of(tape: Tape, chosen: Column, weights: WeightsOfTape) -> BatchOfTape:
    """The batch that the operators `chosen` of one micro-batch work on: tokens from lookups and products, the length from attention.

    A table is looked up with one index for each token, and most of the products have one row for each.
    """
    operators, strings = tape.operators, tape.strings
    forward = chosen[operators.phase[chosen] == Phase.FORWARD]
    kinds = [operator_class(strings[n]) for n in operators.name[forward].tolist()]
    tokens = _tokens(tape, forward, kinds, weights)
    length = _length(tape, forward, tokens)
    return BatchOfTape(num_tokens=tokens, sequence_length=length, num_examples=tokens // length if length else 0)


def _tokens(tape: Tape, forward: Column, kinds: Sequence[str], weights: WeightsOfTape) -> int:
    """The indices of the lookup that most of the products have as many rows as; of the largest one where they tell nothing. Other tables are looked up too, by distances between tokens."""
    operators, strings = tape.operators, tape.strings
    found: set[int] = set()
    for operator, kind in zip(forward.tolist(), kinds, strict=True):
        table = weights.largest(strings[operators.module[operator]])
        if kind != "embedding" or not table:
            continue
        for size in _INDEX_BYTES:
            extra = int(operators.bytes_read[operator]) - table
            if extra > 0 and extra % size == 0 and operators.bytes_written[operator] % (extra // size) == 0:
                found.add(extra // size)
                break
    if not found:
        return 0
    geometry = tape.geometry
    own = np.flatnonzero(np.isin(geometry.operator, forward) & (geometry.batch == 1) & (geometry.taps == 0))
    flops = operators.flops[geometry.operator[own]]
    of_rows = {n: float(flops[geometry.num_rows[own] == n].sum()) for n in found}
    return max(found, key=lambda n: (of_rows[n], n))


def _length(tape: Tape, forward: Column, tokens: int) -> int:
    """The length of the sequences that attend to themselves, by a fused kernel or by products of their own: as many queries as keys, once for each head of each sequence. 0 where nothing does."""
    geometry = tape.geometry
    own = np.isin(geometry.operator, forward) & (geometry.batch > 1) & (geometry.taps == 0)
    for place in np.flatnonzero(own & (geometry.num_rows == geometry.num_columns)).tolist():
        length, batch = int(geometry.num_rows[place]), int(geometry.batch[place])
        if tokens and tokens % length == 0 and batch * length % tokens == 0:
            return length
    return 0
