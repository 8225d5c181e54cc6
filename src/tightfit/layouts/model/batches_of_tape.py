"""How many tokens and examples a traced micro-batch has, as far as its operators show it."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tightfit.cost.classes import operator_class
from tightfit.layouts.model.weights_of_tape import WeightsOfTape
from tightfit.tape import Column, Phase, Tape

_INDEX_BYTES = (8, 4)
# Kernels of causal attention skip tiles above the diagonal; the count of FLOPs includes those that the diagonal cuts.
_TILE = 128


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchOfTape:
    """`num_tokens` of one micro-batch in sequences of `sequence_length`; 0 where a workload has no tokens. `num_examples` is 0 where it is not known."""

    num_tokens: int
    sequence_length: int
    num_examples: int


def batch_of(tape: Tape, chosen: Column, weights: WeightsOfTape) -> BatchOfTape:
    """The batch that the operators `chosen` of one micro-batch work on: tokens from lookups and products, the length from attention.

    A table is looked up with one index for each token, and most of the products have one row for each. Fused attention of length s over an output of n elements takes 4 s n FLOPs, and about half of it
    where it is causal; without a fused kernel the scores are products of as many rows as columns.
    """
    operators, strings = tape.operators, tape.strings
    forward = chosen[operators.phase[chosen] == Phase.FORWARD]
    kinds = [operator_class(strings[n]) for n in operators.name[forward].tolist()]
    tokens = _tokens(tape, forward, kinds, weights)
    lengths: list[float] = []
    for operator, kind in zip(forward.tolist(), kinds, strict=True):
        if kind == "attention" and operators.flops[operator] > 0:
            item = 4 if strings[operators.dtype[operator]] == "float32" else 2
            # The output and its logsumexp: the query's share of what is read is the output's size.
            elements = _output_elements(tape, operator, item)
            if elements:
                lengths.append(float(operators.flops[operator]) / (4 * elements))
    length = _length(tokens, lengths) if lengths else _length_of_scores(tape, forward, tokens)
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


def _length_of_scores(tape: Tape, forward: Column, tokens: int) -> int:
    """The length of the sequences whose scores are products of their own; all tokens are one sequence where there are none."""
    geometry = tape.geometry
    own = np.isin(geometry.operator, forward) & (geometry.batch > 1) & (geometry.taps == 0)
    for place in np.flatnonzero(own & (geometry.num_rows == geometry.num_columns)).tolist():
        length, batch = int(geometry.num_rows[place]), int(geometry.batch[place])
        # One product for each head of each sequence.
        if tokens and tokens % length == 0 and batch * length % tokens == 0:
            return length
    return tokens


def _output_elements(tape: Tape, operator: int, item: int) -> int:
    made = np.flatnonzero(tape.storages.operator == operator)
    return int(tape.storages.num_bytes[made].max(initial=0)) // item


def _length(tokens: int, lengths: list[float]) -> int:
    """The length of a sequence, of those that divide the tokens: the attention's, taken as plain or as causal."""
    if not tokens or not lengths:
        return tokens
    plain = max(lengths)
    for candidate in (2 * plain - _TILE, 2 * plain - 1, 2 * plain, plain):
        nearest = round(candidate)
        if nearest > 0 and abs(candidate - nearest) < 0.01 and tokens % nearest == 0:
            return nearest
    return tokens
