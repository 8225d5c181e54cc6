"""Bytes of an element, by the type of an operator's arithmetic."""

from tightfit.tape.columns import Tape

REAL_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def element_bytes(tape: Tape, operator: int) -> int | None:
    """What each real number that an operator writes takes; None where it writes others, such as booleans, integers or complex numbers."""
    return REAL_BYTES.get(tape.strings[tape.operators.dtype[operator]])
