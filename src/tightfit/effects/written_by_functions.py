"""Whether a function of the program's may write to something that stays, so that to call it twice is not to call it once.

Its code is read, and that of the program's functions that it names: attributes, globals and variables of outer functions that are set, and methods that change
what is not a variable of the function's own. It says yes rather too often: who asks goes without what it would have gained.
"""

import dis
import functools
import types
from typing import Any

from tightfit.effects.asked_of_saved import called, saved_names

_WRITES = ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF")
_FROM_OUTSIDE = ("LOAD_ATTR", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_METHOD")
_CHANGING = frozenset(
    [
        *(
            "add",
            "append",
            "appendleft",
            "clear",
            "discard",
            "extend",
            "extendleft",
            "get",
            "get_nowait",
            "insert",
            "pop",
        ),
        *(
            "popitem",
            "popleft",
            "put",
            "put_nowait",
            "remove",
            "reverse",
            "rotate",
            "send",
            "setdefault",
            "sort",
            "step",
        ),
        *("update", "write", "writelines"),
    ]
)
_FUNCTIONS = frozenset(["delattr", "exec", "next", "open", "setattr"])
# `torch.add` changes nothing.
_LIBRARIES = ("torch", "functional", "F", "np", "math")
# So far before a store into a container its name may be read.
_SPAN = 12


def may_write(function: Any) -> bool:
    """Whether a call of `function` may change something that a second call would find changed."""
    if isinstance(function, types.MethodType):
        function = function.__func__
    if not isinstance(function, types.FunctionType):
        return True
    # What it names may be another function the next time.
    return any(_writes(one.__code__) or _holds_methods(one) for one, _ in called(function))


def _holds_methods(function: types.FunctionType) -> bool:
    """Whether it names a method of an object in C, such as the `append` of a list."""
    named = [function.__globals__.get(name) for name in function.__code__.co_names]
    for cell in function.__closure__ or ():
        try:
            named.append(cell.cell_contents)
        except ValueError:
            continue
    return any(
        isinstance(each, types.BuiltinMethodType) and not isinstance(each.__self__, types.ModuleType | type(None))
        for each in named
    )


# By code, which does not keep what the program has in its globals.
@functools.lru_cache(maxsize=1024)
def _writes(code: types.CodeType) -> bool:
    saved, instructions = saved_names(code), [each for each in dis.get_instructions(code) if each.opname != "CACHE"]
    for position, each in enumerate(instructions):
        before = instructions[position - 1] if position else None
        if each.opname in _WRITES or (each.opname == "LOAD_GLOBAL" and each.argval in _FUNCTIONS):
            return True
        span = instructions[max(0, position - _SPAN) : position]
        if each.opname in ("STORE_SUBSCR", "DELETE_SUBSCR") and any(one.opname in _FROM_OUTSIDE[:3] for one in span):
            return True
        if each.opname in ("LOAD_METHOD", "LOAD_ATTR") and before is not None:
            is_in_place = each.argval.endswith("_") and not each.argval.endswith("__")
            is_of_others = before.opname in _FROM_OUTSIDE and before.argval not in _LIBRARIES
            is_of_saved = before.opname == "LOAD_FAST" and before.argval in saved
            if (is_in_place and (is_of_others or is_of_saved)) or (each.argval in _CHANGING and is_of_others):
                return True
    return any(_writes(inner) for inner in code.co_consts if isinstance(inner, types.CodeType))
