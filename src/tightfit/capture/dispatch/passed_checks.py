"""What a condition on unknown values reads as where one of its answers raises an error: the other one, as the program passes its own checks on a card.

`assert (x > 0).all()`, `if not torch.equal(a, b): raise ValueError(...)`. Whether an answer raises is read from the bytecode behind the condition:
straight-line code that ends in a `raise`.
"""

import dis
import functools
import os
from types import CodeType, FrameType

import torch

from tightfit.errors.faults import is_own_file

# What stands in a compiled condition between a read and the jump that depends on it.
_TRANSPARENT = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "TO_BOOL"})
_LEADING = "IF_"  # POP_JUMP_IF_TRUE, POP_JUMP_FORWARD_IF_FALSE, JUMP_IF_FALSE_OR_POP ...
_UNCONDITIONAL = frozenset({"JUMP_FORWARD", "JUMP", "JUMP_NO_INTERRUPT"})
_ENDS = ("RETURN_", "YIELD_", "FOR_ITER", "JUMP_BACKWARD", "SEND", "RERAISE")
_MAX_INSTRUCTIONS = 400
_TORCH = os.path.dirname(torch.__file__) + os.sep
# Between an operator of the program and its handler; torch's own checks (`torch._assert`) are elsewhere.
_DISPATCHING = tuple(_TORCH + name for name in ("_compile.py", "_subclasses/", "_ops.py", "utils", "overrides.py"))


def passing_answer(frame: FrameType | None) -> bool | None:
    """The answer that a check passes with, which reads a value on the card below `frame`; None if no check is known to."""
    while frame is not None and (
        is_own_file(frame.f_code.co_filename) or frame.f_code.co_filename.startswith(_DISPATCHING)
    ):
        frame = frame.f_back
    return None if frame is None else _answer(frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=4096)
def _answer(code: CodeType, offset: int) -> bool | None:
    instructions = list(dis.get_instructions(code))
    at = {instruction.offset: index for index, instruction in enumerate(instructions)}
    # A call of a Python function may have left the offset at the cache entries behind the call.
    index = max((i for i, instruction in enumerate(instructions) if instruction.offset <= offset), default=0)
    # The jump itself asks for the truth of a tensor; a number that `item()` or `bool()` has returned is asked for it right behind.
    if _LEADING not in instructions[index].opname:
        index += 1
        while index < len(instructions) and instructions[index].opname in _TRANSPARENT:
            index += 1
    if index >= len(instructions) or _LEADING not in instructions[index].opname or "NONE" in instructions[index].opname:
        return None
    jump = instructions[index]
    jumps_on = "IF_TRUE" in jump.opname
    by_jump, by_falling = (_raises(instructions, at, begin) for begin in (at.get(jump.argval), index + 1))
    if by_jump == by_falling:
        return None
    return jumps_on if by_falling else not jumps_on


def _raises(instructions: list[dis.Instruction], at: dict[int, int], index: int | None) -> bool:
    """Whether the code from an instruction on raises an error, whatever its values."""
    for _ in range(_MAX_INSTRUCTIONS):
        if index is None or index >= len(instructions):
            return False
        instruction = instructions[index]
        name = instruction.opname
        if name in ("LOAD_ASSERTION_ERROR", "RAISE_VARARGS"):
            return True
        if _LEADING in name or name.startswith(_ENDS):
            return False
        index = at.get(instruction.argval) if name in _UNCONDITIONAL else index + 1
    return False
