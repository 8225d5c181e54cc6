"""Owners are notified of audit events while they want to be, and a process has one hook for all of them: none can be taken off again."""

import gc
import sys
import weakref
from typing import Any

import pytest

from tightfit.torch_hooks import audit_events
from tightfit.torch_hooks.audit_events import on_audit_events

EVENT = "tightfit.tests"


class Listening:
    def __init__(self) -> None:
        self.heard_values: list[Any] = []

    def heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        assert event == EVENT
        self.heard_values.append(arguments[0])


def test_owners_hear_their_events_until_they_leave_in_any_order() -> None:
    first, second = Listening(), Listening()
    leave_first = on_audit_events(first, frozenset({EVENT}))
    leave_second = on_audit_events(second, frozenset({EVENT, "other"}))
    sys.audit(EVENT, 1)
    sys.audit("tightfit.tests.of_nobody", 2)
    leave_first()
    sys.audit(EVENT, 3)
    leave_second()
    leave_first()
    sys.audit(EVENT, 4)
    third = Listening()
    on_audit_events(third, frozenset({EVENT}))
    # What has left before is not this one.
    leave_first()
    leave_second()
    sys.audit(EVENT, 5)
    assert (first.heard_values, second.heard_values, third.heard_values) == ([1], [1, 3], [5])


def test_an_owner_that_is_dropped_is_collected() -> None:
    owner = Listening()
    on_audit_events(owner, frozenset({EVENT}))
    dropped = weakref.ref(owner)
    del owner
    gc.collect()
    assert dropped() is None
    sys.audit(EVENT, 1)


def test_a_process_gets_one_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: list[Any] = []
    monkeypatch.setattr(sys, "addaudithook", hooks.append)
    monkeypatch.setattr(audit_events, "_installed", [])
    for _ in range(3):
        on_audit_events(Listening(), frozenset({EVENT}))
    assert len(hooks) == 1


def test_what_an_owner_raises_ends_what_the_event_stands_for() -> None:
    class Refusing(Listening):
        def heard(self, event: str, arguments: tuple[Any, ...]) -> None:
            raise PermissionError(event)

    owner = Refusing()
    leave = on_audit_events(owner, frozenset({EVENT}))
    with pytest.raises(PermissionError):
        sys.audit(EVENT)
    leave()
