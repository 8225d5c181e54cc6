"""How many tokens and examples a traced micro-batch has, as far as its operators show it."""

import dataclasses

import numpy as np

from tightfit.cost.classes import operator_class
from tightfit.layouts.weights_of_tape import WeightsOfTape
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
    """The batch that the operators `chosen` of one micro-batch work on: tokens from the largest lookup, the length from attention.

    A table is looked up with one index for each token. Attention of length s over an output of n elements takes 4 s n FLOPs, and about half of it where it is causal.
    """
    operators, strings = tape.operators, tape.strings
    tokens = 0
    lengths: list[float] = []
    for operator in chosen[operators.phase[chosen] == Phase.FORWARD].tolist():
        kind = operator_class(strings[operators.name[operator]])
        table = weights.largest(strings[operators.module[operator]])
        if kind == "embedding" and table:
            for size in _INDEX_BYTES:
                extra = int(operators.bytes_read[operator]) - table
                if extra > 0 and extra % size == 0 and operators.bytes_written[operator] % (extra // size) == 0:
                    tokens = max(tokens, extra // size)
                    break
        elif kind == "attention" and operators.flops[operator] > 0:
            item = 4 if strings[operators.dtype[operator]] == "float32" else 2
            # The output and its logsumexp: the query's share of what is read is the output's size.
            elements = _output_elements(tape, operator, item)
            if elements:
                lengths.append(float(operators.flops[operator]) / (4 * elements))
    length = _length(tokens, lengths)
    return BatchOfTape(num_tokens=tokens, sequence_length=length, num_examples=tokens // length if length else 0)


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
