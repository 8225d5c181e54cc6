"""The program's functions that stand behind one of a library's: what `torch.no_grad()`, `contextlib.contextmanager` or a library's `retry` has made of them.

Such a function is code of the library's, and has the program's in its closure.
"""

import types
from collections.abc import Iterator
from typing import Any

from tightfit.effects.reachable.cells import contents
from tightfit.effects.users_code import FILES_OF_OURS, is_users_file, is_users_function


def decorated_by(function: types.FunctionType) -> Iterator[Any]:
    """What a function of a library's has in its closure that runs code of the program's; nothing for one of ours."""
    if function.__code__.co_filename.startswith(FILES_OF_OURS):
        return
    for cell in function.__closure__ or ():
        for value in contents(cell):
            # `functools.singledispatch` has its functions in a dict.
            for each in value.values() if type(value) is dict else (value,):
                if isinstance(each, types.FunctionType | types.MethodType) or is_users_function(each):
                    yield each


def users_functions_of(function: Any) -> Iterator[types.FunctionType]:
    """The functions of the program's that a function is, or that decorators of libraries have wrapped in it."""
    waiting, seen = [function], set[int]()
    while waiting:
        each = waiting.pop()
        each = each.__func__ if isinstance(each, types.MethodType) else each
        if not isinstance(each, types.FunctionType) or id(each) in seen:
            continue
        seen.add(id(each))
        if is_users_file(each.__code__.co_filename):
            yield each
        else:
            waiting += decorated_by(each)
