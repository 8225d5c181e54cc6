"""Notifies owners of Python's audit events (`sys.addaudithook`, PEP 578).

Python has no way to take an audit hook off again, and each one is called for every `id`, `open` and attribute access by `object.__getattribute__`
for the rest of the process. So there is one for all owners, put there by the first of them; without owners it returns at once.
"""

import functools
import itertools
import sys
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from tightfit.torch_hooks.replaced import Leave


class AuditOwner(Protocol):
    """Is notified of events. It is held weakly."""

    def heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Called before what the event stands for happens; what it raises ends that."""
        ...


_Owners = dict[int, tuple[frozenset[str], "weakref.ref[Any]"]]
_owners: _Owners = {}
# None is used twice: an owner may be left when it was collected, and another one has come.
_numbers = itertools.count()
_installed: list[Callable[..., None]] = []


def on_audit_events(owner: AuditOwner, events: frozenset[str]) -> Leave:
    """Notifies `owner` of these events until the returned function is called, or `owner` is collected."""
    key = next(_numbers)
    # In C, with the dead reference for what `pop` returns in its absence: an interrupt within Python code of such a callback would be lost.
    _owners[key] = events, weakref.ref(owner, functools.partial(_owners.pop, key))
    if not _installed:
        _installed.append(_heard)
        sys.addaudithook(_heard)
    return functools.partial(_owners.pop, key, None)


# The table is an argument: while the interpreter ends, events go on when the globals of modules are gone.
def _heard(event: str, arguments: tuple[Any, ...], owners: _Owners = _owners) -> None:
    if owners:
        for events, reference in tuple(owners.values()):
            owner = reference() if event in events else None
            if owner is not None:
                owner.heard(event, arguments)
