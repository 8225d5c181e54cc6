"""Deaths are noted without running Python code, and tables of weak keys forget what died."""

import _thread
import ast
import copy
import functools
import itertools
import pickle
import signal
import time
import weakref
from pathlib import Path

import pytest

import tightfit
from tightfit.torch_hooks.weak_references import Deaths, WeakTable


class Thing:
    """Something that can be held weakly."""


def test_deaths_come_in_order_with_their_times() -> None:
    deaths = Deaths()
    things = [Thing(), Thing()]
    references = [weakref.ref(thing, deaths.note) for thing in things]
    clocks = [weakref.ref(thing, deaths.note_time) for thing in things]
    begin = time.time_ns()
    things.pop()
    middle = time.time_ns()
    things.pop()
    found = list(deaths)
    assert [reference for reference, _ in found] == references[::-1]
    assert begin <= found[0][1] <= middle <= found[1][1] <= time.time_ns()
    assert len(clocks) == 2
    assert list(deaths) == []


def test_what_was_interrupted_comes_again() -> None:
    deaths = Deaths()
    thing = Thing()
    reference = weakref.ref(thing, deaths.note)
    del thing
    for found, _ in deaths:
        assert found is reference
        break
    assert [found for found, _ in deaths] == [reference]


def test_a_table_forgets_what_died_and_is_not_confused_by_its_address() -> None:
    table: WeakTable[Thing, str] = WeakTable()
    kept = Thing()
    table[kept] = "kept"
    for _ in range(100):
        thing = Thing()
        assert thing not in table
        assert table.get(thing) is None
        assert table.setdefault(thing, "passing") == "passing"
    assert len(table) == 2
    assert sorted(table.values()) == ["kept", "passing"]
    del thing
    assert (list(table), table[kept], table.setdefault(kept, "other")) == ([kept], "kept", "kept")
    del table[kept]
    with pytest.raises(KeyError):
        table[kept]


def test_a_copy_of_a_table_has_its_entries_and_a_pickle_none() -> None:
    table: WeakTable[Thing, list[int]] = WeakTable()
    kept = Thing()
    table[kept] = [1]
    copied = copy.deepcopy(table)
    copied[kept].append(2)
    assert (table[kept], copied[kept]) == ([1], [1, 2])
    assert len(pickle.loads(pickle.dumps(table))) == 0


def test_equal_objects_are_told_apart() -> None:
    class Equal(Thing):
        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 0

    one, other = Equal(), Equal()
    table: WeakTable[Equal, int] = WeakTable()
    table[one], table[other] = 1, 2
    assert (table[one], table[other]) == (1, 2)


def test_an_interrupt_at_the_death_of_a_key_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A younger reference's callback, which runs no Python code either, leaves the interrupt pending while the table's callback runs."""
    interrupts = map(_thread.interrupt_main, itertools.repeat(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    table: WeakTable[Thing, int] = WeakTable()

    def drop() -> None:
        thing = Thing()
        table[thing] = 1
        reference = weakref.ref(thing, functools.partial(next, interrupts))
        del thing
        assert reference() is not None, "the interrupt was lost"

    try:
        with pytest.raises(KeyboardInterrupt):
            drop()
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(table) == 0


# What is replaced in the process that traces is gone with it, and so are interrupts: whoever asked for it ends it.
OF_THE_CHILD = "capture"
WITH_PYTHON_CALLBACKS = {"WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "WeakMethod", "finalize"}


def callbacks(path: Path) -> list[str]:
    """What in a file runs Python code at somebody's death, by line."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if name in WITH_PYTHON_CALLBACKS or (isinstance(node, ast.FunctionDef) and node.name == "__del__"):
            found.append(f"{path.name}:{node.lineno}")  # type: ignore[attr-defined]
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "weakref.ref" and len(node.args) > 1:
            callback = node.args[1]
            if isinstance(callback, ast.Lambda) or (
                isinstance(callback, ast.Attribute) and callback.attr[:4] != "note"
            ):
                found.append(f"{path.name}:{node.lineno}")
    return found


def test_nothing_of_ours_runs_python_code_at_a_death_in_the_users_process() -> None:
    package = Path(tightfit.__file__).parent
    files = [path for path in package.rglob("*.py") if OF_THE_CHILD not in path.relative_to(package).parts]
    found = {path.name: lines for path in files if (lines := callbacks(path))}
    # Of the optimizer's hooks.
    found.pop("backward_updates.py", None)
    # Names the class, to recognise those of the program.
    found.pop("scopes.py", None)
    assert not found
