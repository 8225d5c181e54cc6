"""The experts of a block: the weights of modules that multiply group by group (`torch._grouped_mm`), of which each token uses some.

Experts that a model loops over, one product after another, look like any other weights.
"""

import dataclasses

import numpy as np

from tightfit.layouts.model.weights_of_tape import WeightsOfTape
from tightfit.tape import Column, Tape

GROUPED = "grouped_mm"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """How many experts there are, the bytes of all their weights, and how many of them a token uses."""

    number: int = 0
    num_bytes: int = 0
    per_token: float = 1.0


def experts_of(tape: Tape, weights: WeightsOfTape, chosen: Column, input_bytes: int) -> Experts:
    """The experts among the operators `chosen`, ascending, of the forward pass of a block that is given `input_bytes`."""
    operators, strings = tape.operators, tape.strings
    grouped = [at for at in chosen.tolist() if GROUPED in strings[operators.name[at]]]
    rows = np.flatnonzero(np.isin(tape.geometry.operator, grouped))
    if not len(rows):
        return Experts()
    paths = dict.fromkeys(strings[operators.module[at]] for at in grouped)
    # Of the first product, which has the width of the block: a row for each expert of each token.
    first = int(rows[0])
    geometry, written = tape.geometry, int(operators.bytes_written[tape.geometry.operator[first]])
    input_of_rows = written / int(geometry.num_columns[first]) * int(geometry.depth[first])
    return Experts(
        number=int(geometry.batch[rows].max()),
        num_bytes=weights.of_modules(paths).total,
        per_token=max(1.0, input_of_rows / input_bytes) if input_bytes else 1.0,
    )
