"""One name of a library, replaced for as long as it has owners, and dispatched to them.

Owners are held weakly. They enter and leave in any order; when the last one has left or was collected, the name stands for what it stood for
before, the same object. If somebody else has put something around ours meanwhile, that stays, with ours inside as a pass-through that knows
no owner; it is used again when an owner comes, so that nothing is stacked.
"""

import functools
import itertools
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from tightfit.torch_hooks.manifest import Name

Owner = TypeVar("Owner")
Leave = Callable[[], None]
# Takes what the name stood for before and what tells the owners, and gives what stands there while there are owners.
Put = Callable[[Callable[..., Any], Callable[[], list[Owner]]], Callable[..., Any]]

_MOST_LOOKED_AT = 500


class _OwnerReference(weakref.ref[Owner]):
    """A weak reference that knows its number."""

    __slots__ = ("number",)

    number: int


class Replaced(Generic[Owner]):
    """The name `known`, in whose place `put(inner, owners)` stands while somebody owns it.

    What `put` makes asks for the owners at each call, in the order in which they entered. It gets none once it was left behind, and then only
    calls `inner`.
    """

    def __init__(self, known: Name, put: Put[Owner]) -> None:
        self.known = known
        self._put = put
        self._references: dict[int, _OwnerReference[Owner]] = {}
        self._numbers = itertools.count()
        # An owner may be collected, and leave, while another one enters in the same thread.
        self._lock = threading.RLock()
        self._holder: Any = None
        self._ours: weakref.ref[Callable[..., Any]] | None = None
        self._inner: Any = None
        self._layer = 0

    def enter(self, owner: Owner) -> Leave:
        """Has `owner` among the owners until what is returned is called, or `owner` is collected.

        Raises:
            ApplyError: the installed library has no such name.
        """
        with self._lock:
            number = next(self._numbers)
            reference = _OwnerReference(owner, self._collected)
            reference.number = number
            self._references[number] = reference
            try:
                self._install()
            except BaseException:
                self._leave(number)
                raise
        return functools.partial(self._leave, number)

    def owners(self) -> list[Owner]:
        """The owners that are there, in the order in which they entered."""
        living = (reference() for reference in list(self._references.values()))
        return [owner for owner in living if owner is not None]

    def _owners_of(self, layer: int) -> list[Owner]:
        if layer != self._layer:
            return []
        if not self._references:
            self._restore()  # somebody has taken away again what was around this one
        return self.owners()

    def _install(self) -> None:
        self._holder = self.known.holder()
        ours, current = self._ours and self._ours(), vars(self._holder)[self.known.name]
        if ours is not None and _leads_to(current, ours):
            return
        self._layer += 1
        made = self._put(current, functools.partial(self._owners_of, self._layer))
        # The name itself keeps what is put there, or somebody who has put something around it does.
        self._ours, self._inner = weakref.ref(made), current
        setattr(self._holder, self.known.name, made)

    def _collected(self, reference: Any) -> None:
        # This may run while the interpreter ends, when this module's own names are gone already.
        self._leave(reference.number)

    def _leave(self, number: int) -> None:
        with self._lock:
            self._references.pop(number, None)
            self._restore()

    def _restore(self) -> None:
        with self._lock:
            ours = self._ours and self._ours()
            if ours is None or self._references:
                return
            if vars(self._holder)[self.known.name] is ours:
                setattr(self._holder, self.known.name, self._inner)
                self._ours = self._inner = None


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
