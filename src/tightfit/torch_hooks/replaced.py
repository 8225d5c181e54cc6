"""One name of a library, replaced for as long as it has owners, and dispatched to them.

Owners are held weakly. They enter and leave in any order; when the last one has left or was collected, the name stands for what it stood for
before, the same object. If somebody else has put something around ours meanwhile, that stays, with ours inside as a pass-through that knows
no owner; it is used again when an owner comes, so that nothing is stacked.
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

from tightfit.torch_hooks.manifest import Name

Owner = TypeVar("Owner")
Leave = Callable[[], object]
# Takes what the name stood for before and what tells the owners, and gives what stands there while there are owners.
Put = Callable[[Callable[..., Any], Callable[[], list[Owner]]], Callable[..., Any]]

_MOST_LOOKED_AT = 500


class Replaced(Generic[Owner]):
    """The name `known`, in whose place `put(inner, owners)` stands while somebody owns it.

    What `put` makes asks for the owners at each call, in the order in which they entered. It gets none once it was left behind, and then only
    calls `inner`.
    """

    def __init__(self, known: Name, put: Put[Owner]) -> None:
        self.known = known
        self._put = put
        self._references: dict[int, weakref.ref[Owner]] = {}
        self._numbers = itertools.count()
        # An owner may be collected, and leave, while another one enters in the same thread.
        self._lock = threading.RLock()
        self._ours: Any = None
        self._layer = 0
        # What takes ours away, by the number of what stands there and by how many owners there are.
        self._away: dict[tuple[int, int], Callable[[], object]] = {}

    def enter(self, owner: Owner) -> Leave:
        """Has `owner` among the owners until what is returned is called, or `owner` is collected.

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
                leave(None)
                raise
        return functools.partial(leave, None)

    def owners(self) -> list[Owner]:
        """The owners that are there, in the order in which they entered."""
        living = (reference() for reference in list(self._references.values()))
        return [owner for owner in living if owner is not None]

    def _owners_of(self, holder: Any, layer: int) -> list[Owner]:
        if layer != self._layer:
            return []
        with self._lock:
            if not self._references and vars(holder).get(self.known.name) is self._ours:
                # Somebody has taken away again what was around this one.
                self._away[id(self._ours), 0]()
        return self.owners()

    def _install(self, holder: Any) -> None:
        name = self.known.name
        is_inherited = name not in vars(holder)
        current = inspect.getattr_static(holder, name)
        if self._ours is not None and _leads_to(current, self._ours):
            return
        self._layer += 1
        self._ours = self._put(current, functools.partial(self._owners_of, holder, self._layer))
        away = functools.partial(delattr, holder, name)
        self._away.clear()
        self._away[id(self._ours), 0] = away if is_inherited else functools.partial(setattr, holder, name, current)
        setattr(holder, name, self._ours)

    def _leave(self, holder: Any, number: int) -> Callable[[object], object]:
        """Takes the owner of this number away, and if it was the last one and ours stands there, puts back what stood there.

        It runs no Python code, as it is called when an owner is collected: see `tightfit.torch_hooks.weak_references`. Whatever it is called with is ignored.
        """
        always = itertools.repeat
        left = map(self._references.pop, always(number), always(None))
        now = map(id, map(vars(holder).get, always(self.known.name)))
        place = zip(now, map(len, always(self._references)), strict=True)
        put = map(operator.call, map(self._away.get, place, always(int)))
        return functools.partial(cast(Callable[..., object], next), zip(left, put, strict=True))


def _leads_to(start: Any, wanted: Any) -> bool:
    """Whether `wanted` is `start`, or is called by it as far as one can see: in its closure, its defaults, its attributes or its names."""
    seen: set[int] = set()
    waiting = deque([start])
    while waiting and len(seen) < _MOST_LOOKED_AT:
        found = waiting.popleft()
        if found is wanted:
            return True
        if id(found) not in seen:
            seen.add(id(found))
            waiting.extend(_called_by(found))
    return False


def _called_by(value: Any) -> Iterator[Any]:
    """What a callable refers to and may call."""
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
    elif callable(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
        yield from vars(value).values()
