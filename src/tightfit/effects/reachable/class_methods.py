"""Which methods of the program's classes a walk looks at, as code of the region may run them: by name, by `super()`, or by a name that is made at run time."""

import functools
import types
from collections.abc import Iterable
from typing import Any, Protocol, final

from tightfit.effects.code import Code
from tightfit.effects.reachable.decorated import users_functions_of
from tightfit.effects.reachable.named_in_code import all_methods_of, functions_behind, named_in
from tightfit.effects.users_code import is_users_class


class WalkOfCode(Protocol):
    """What goes on with the code of a method."""

    def value(self, path: str, value: Any) -> None:
        """Looks at a value of any type."""
        ...

    def function(self, path: str, function: types.FunctionType) -> None:
        """Looks at a function."""
        ...


@final
class ClassMethods:
    """The classes of one walk, whose `code` is noted; the walk itself is given to each call: to keep it would keep all that it has met."""

    def __init__(self, code: Code) -> None:
        self._code = code
        self._walked: dict[type, set[str]] = {}
        self._all: dict[type, frozenset[str]] = {}
        # Objects of them are made, or their methods named, at run time; and those that were gone through for it.
        self._may_run: dict[type, None] = {}
        self._gone_through = set[type]()

    def may_all_run(self, kind: type) -> None:
        """Any method of the class may run, also those that make an object."""
        self._may_run[kind] = None

    def look_at(self, walk: WalkOfCode, kind: type, names: Iterable[str]) -> None:
        """The code of those methods of a class, of what they call on `self`, and of the same methods of its bases, which `super()` leads to."""
        seen = self._walked.setdefault(kind, set())
        waiting = [name for name in names if name not in seen]
        seen.update(waiting)
        while waiting:
            name = waiting.pop()
            for number, owner in enumerate(base for base in kind.__mro__ if name in vars(base)):
                is_librarys = number and not is_users_class(owner)
                for function in functions_behind(vars(owner)[name]):
                    # What the program has put on a library's class is its own.
                    if is_librarys and next(users_functions_of(function), None) is None:
                        continue
                    more = self._named_by(walk, kind, name, function) - seen
                    waiting += more
                    seen |= more
            self._code.method(kind, name)

    def look_at_named(self, walk: WalkOfCode, attributes: set[str]) -> None:
        """The methods that code names, of all classes."""
        for kind in list(self._walked):
            if kind not in self._all:
                self._all[kind] = all_methods_of(kind)
            self.look_at(walk, kind, self._all[kind] & attributes)

    def look_at_others(self, walk: WalkOfCode) -> bool:
        """All methods of classes of which any may run; whether there were such classes."""
        waiting = [kind for kind in self._may_run if kind not in self._gone_through]
        self._gone_through.update(waiting)
        for kind in waiting:
            self.look_at(walk, kind, all_methods_of(kind))
        return bool(waiting)

    def _named_by(self, walk: WalkOfCode, kind: type, name: str, function: Any) -> set[str]:
        attributes = set[str]()
        if isinstance(function, functools._lru_cache_wrapper):
            walk.value(f"{kind.__name__}.{name}", function)
            function = function.__wrapped__
        if isinstance(function, types.FunctionType):
            walk.function(f"{kind.__name__}.{name}", function)
            for inner in users_functions_of(function):
                named = named_in(inner.__code__)
                attributes |= named.attributes
                if named.reads_all_attributes:
                    self.may_all_run(kind)
        return attributes
