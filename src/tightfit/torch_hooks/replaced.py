"""One name of a library, replaced by a wrapper as long as it has owners, and dispatched to them.

Owners are held weakly. They enter and leave in any order; when the last one has left or was collected, the name is bound to the same object as
before. If other code has wrapped our wrapper meanwhile, that stays, with ours inside as a pass-through without owners; it is used again when an
owner enters, so that wrappers do not pile up.
"""

import functools
import inspect
import itertools
import operator
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, cast

from tightfit.effects.users_code import mark_as_ours
from tightfit.torch_hooks.manifest import Name

Owner = TypeVar("Owner")
Leave = Callable[[], object]
# Takes the original and a function that returns the owners, and returns the wrapper.
Put = Callable[[Callable[..., Any], Callable[[], list[Owner]]], Callable[..., Any]]

# A bound on a walk through other people's objects: a wrapper around a wrapper is found within a few steps, and
# a closure over a whole program need not be searched to its end.
_MAX_LOOKED_AT = 500


class Replaced(Generic[Owner]):
    """The name `known`, bound to `put(inner, owners)` while it has owners.

    The wrapper that `put` makes asks for the owners at each call, in the order in which they entered. It gets none once it was left behind
    inside of other code's wrapper, and then only calls `inner`.
    """

    def __init__(self, known: Name, put: Put[Owner]) -> None:
        self.known = known
        self._put = put
        self._references: dict[int, weakref.ref[Owner]] = {}
        self._numbers = itertools.count()
        # An owner may be collected, and leave, while another one enters in the same thread.
        self._lock = threading.RLock()
        self._ours: Any = None
        # Each wrapper gets its layer's number. Where other code keeps an old wrapper of ours inside of its own,
        # two of them may be called one inside the other: only the newest asks the owners, so none is notified
        # twice.
        self._layer = 0
        # What takes ours away, by whether ours stands there and by how many owners there are.
        self._away: dict[tuple[bool, int], Callable[[], object]] = {}

    def enter(self, owner: Owner) -> Leave:
        """Adds `owner` until the returned function is called, or `owner` is collected.

        Raises:
            ApplyError: the installed library has no such name.
        """
        holder = self.known.holder()
        with self._lock:
            number = next(self._numbers)
            leave = self._leave(holder, number)
            self._references[number] = weakref.ref(owner, leave)
            try:
                self._install(holder)
            except BaseException:
                # An interrupt between entering and installing would otherwise leave an owner that no wrapper
                # serves.
                leave(None)
                raise
        return functools.partial(leave, None)

    def owners(self) -> list[Owner]:
        """The live owners, in the order in which they entered."""
        living = (reference() for reference in list(self._references.values()))
        return [owner for owner in living if owner is not None]

    def _owners_of(self, holder: Any, layer: int) -> list[Owner]:
        if layer != self._layer:
            return []
        with self._lock:
            if not self._references and vars(holder).get(self.known.name) is self._ours:
                # Other code has removed its wrapper from around ours.
                self._away[True, 0]()
        return self.owners()

    def _install(self, holder: Any) -> None:
        name = self.known.name
        is_inherited = name not in vars(holder)
        current = inspect.getattr_static(holder, name)
        # `torch.compile`, profilers and test tools wrap names of torch too. What leads to our wrapper is left
        # as it is; a second wrapper would notify each owner twice.
        if self._ours is not None and _leads_to(current, self._ours):
            return
        self._layer += 1
        self._ours = self._put(current, functools.partial(self._owners_of, holder, self._layer))
        mark_as_ours(self._ours, None if is_inherited else current)
        # A name that the class has from its base is deleted again and not set: a value that was set would hide
        # what other code changes in the base later.
        away = functools.partial(delattr, holder, name)
        self._away.clear()
        self._away[True, 0] = away if is_inherited else functools.partial(setattr, holder, name, current)
        setattr(holder, name, self._ours)

    def _leave(self, holder: Any, number: int) -> Callable[[object], object]:
        """Removes the owner of this number; if it was the last one and the name is bound to our wrapper, restores the original.

        It runs no Python code, as it is called when an owner is collected: see `tightfit.torch_hooks.weak_references`. Its arguments are ignored.
        """
        # `map` and `zip` over endless iterators: each `next` on the chain performs one removal, entirely in C.
        # Python drops exceptions in callbacks of weak references, and a KeyboardInterrupt in Python code there
        # would be lost.
        # `id` would not do: it tells the audit hooks of the process (`sys.addaudithook`), which are Python code.
        always = itertools.repeat
        left = map(self._references.pop, always(number), always(None))
        ours = map(operator.attrgetter("_ours"), always(self))
        is_ours = map(operator.is_, map(vars(holder).get, always(self.known.name)), ours)
        # The key (whether the name is bound to our wrapper, number of owners) is in `_away` only if our wrapper is
        # bound there and no owner is left; for every other key `get` returns its default, `int`, and calling
        # that does nothing.
        place = zip(is_ours, map(len, always(self._references)), strict=True)
        put = map(operator.call, map(self._away.get, place, always(int)))
        return functools.partial(cast(Callable[..., object], next), zip(left, put, strict=True))


def _leads_to(start: Any, wanted: Any) -> bool:
    """Whether `wanted` is `start`, or can be called by it: found in its closure, defaults, attributes or global names."""
    seen: set[int] = set()
    waiting = deque([start])
    while waiting and len(seen) < _MAX_LOOKED_AT:
        found = waiting.popleft()
        if found is wanted:
            return True
        if id(found) not in seen:
            seen.add(id(found))
            waiting.extend(_called_by(found))
    return False


def _called_by(value: Any) -> Iterator[Any]:
    """The objects that a callable refers to and may call."""
    if isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # not filled yet
                continue
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
        yield from (value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__)
        yield from vars(value).values()
    elif isinstance(value, types.MethodType):
        yield value.__func__
        yield value.__self__
    elif isinstance(value, functools.partial):
        yield value.func
        yield from (*value.args, *value.keywords.values())
    elif isinstance(value, list | tuple):
        yield from value
    # Instances with `__call__`, such as `functools.lru_cache` wrappers and the callables of mocking libraries.
    # Classes are left out: their attributes are methods, not what a call leads to.
    elif callable(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
        yield from vars(value).values()
