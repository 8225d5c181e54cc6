"""The instructions of a code object in one form for all versions of Python: those of 3.11.

Each release splits, joins and renames some of them (the section on bytecode of "What's New in Python"): 3.12 loads methods as attributes, 3.13 has one
instruction for two loads or stores of variables, 3.14 loads variables without a reference of their own and takes items by a binary operator.
"""

import dataclasses
import dis
import types
from collections.abc import Iterator
from typing import Any

# Without an effect of their own for who reads code: they prepare a call, mark a place, or widen the next argument.
_LEFT_OUT = frozenset(["CACHE", "EXTENDED_ARG", "NOP", "NOT_TAKEN", "PRECALL", "PUSH_NULL", "RESUME", "TO_BOOL"])
_OTHER_NAMES = {
    "LOAD_METHOD": "LOAD_ATTR",
    "LOAD_SUPER_ATTR": "LOAD_ATTR",
    "LOAD_FAST_CHECK": "LOAD_FAST",
    "LOAD_FAST_BORROW": "LOAD_FAST",
    "LOAD_FROM_DICT_OR_GLOBALS": "LOAD_GLOBAL",
    "LOAD_FROM_DICT_OR_DEREF": "LOAD_DEREF",
    "LOAD_CLASSDEREF": "LOAD_DEREF",
    "LOAD_SMALL_INT": "LOAD_CONST",
    "LOAD_CONST_IMMORTAL": "LOAD_CONST",
    "LOAD_CONST_MORTAL": "LOAD_CONST",
}
_PAIRS = {
    "LOAD_FAST_LOAD_FAST": ("LOAD_FAST", "LOAD_FAST"),
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW": ("LOAD_FAST", "LOAD_FAST"),
    "STORE_FAST_LOAD_FAST": ("STORE_FAST", "LOAD_FAST"),
    "STORE_FAST_STORE_FAST": ("STORE_FAST", "STORE_FAST"),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction, `argval` as `dis` gives it. `line` is that of the source; where an instruction has none, the last one that had."""

    opname: str
    argval: Any
    offset: int
    line: int


def instructions_of(code: types.CodeType) -> Iterator[Instruction]:
    """Of the code object alone, without those of the functions inside."""
    line = code.co_firstlineno
    for each in dis.get_instructions(code):
        if each.positions is not None and each.positions.lineno is not None:
            line = each.positions.lineno
        if each.opname in _LEFT_OUT:
            continue
        if each.opname in _PAIRS:
            for name, value in zip(_PAIRS[each.opname], each.argval, strict=True):
                yield Instruction(opname=name, argval=value, offset=each.offset, line=line)
            continue
        name = _OTHER_NAMES.get(each.opname, each.opname)
        if name == "BINARY_OP" and each.argrepr == "[]":
            name = "BINARY_SUBSCR"
        yield Instruction(opname=name, argval=each.argval, offset=each.offset, line=line)
