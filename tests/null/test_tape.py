"""A tape keeps what it is given, and its spec catches what must not be."""

import dataclasses
import json

import numpy as np
import pytest

from tightfit.errors import RecordingError
from tightfit.tape import (
    Assumption,
    Category,
    Copies,
    CopyDirection,
    EventKind,
    Events,
    Operators,
    Phase,
    Source,
    SpanKind,
    Spans,
    Storages,
    Tape,
    WaitKind,
    Waits,
)
from tightfit.tape.load import read_tape
from tightfit.tape.verify import verify_tape


def small_tape() -> Tape:
    return Tape(
        target="toy.py:step",
        versions={"torch": "2.13.0"},
        traced_for="RTX 4090",
        strings=("", "aten.mm", "linear", "toy.py:3", "float32", "step 1"),
        operators=Operators.from_columns(
            {
                "name": [1],
                "module": [2],
                "line": [3],
                "dtype": [4],
                "phase": [Phase.FORWARD],
                "stream": [0],
                "flops": [2e6],
                "bytes_read": [100],
                "bytes_written": [100],
            }
        ),
        storages=Storages.from_columns(
            {
                "num_bytes": [1000, 2000],
                "low_bytes": [1000, 1500],
                "high_bytes": [1000, 3000],
                "category": [Category.PARAMETERS, Category.ACTIVATIONS],
                "source": [Source.TENSOR, Source.TENSOR],
                "operator": [-1, 0],
                "stream": [0, 0],
            }
        ),
        events=Events.from_columns(
            {
                "kind": [EventKind.ALLOCATE, EventKind.ALLOCATE, EventKind.FREE],
                "storage": [0, 1, 1],
                "operator": [0, 1, 1],
                "value": [0, 0, 0],
            }
        ),
        spans=Spans.from_columns({"name": [5], "kind": [SpanKind.STEP], "begin": [0], "end": [3]}),
        assumptions=(Assumption(where="toy.py:4", what="a read"),),
        host_peak_bytes=17,
        random_operators=("mylib.noise",),
        operators_of_steps=((0, 1),),
        copies=Copies.from_columns(
            {
                "operator": [0],
                "direction": [CopyDirection.TO_HOST],
                "is_pinned": [True],
                "is_blocking": [False],
                "num_bytes": [100],
            }
        ),
        waits=Waits.from_columns(
            {
                "kind": [WaitKind.RECORD, WaitKind.HOST_FOR_EVENT, WaitKind.HOST_READS],
                "operator": [0, 1, 1],
                "stream": [1, -1, 0],
                "event": [70_000, 70_000, -1],
            }
        ),
    )


def test_a_tape_survives_the_round_trip(tmp_path):
    tape = small_tape()
    tape.save(tmp_path / "toy.npz")
    loaded = Tape.load(tmp_path / "toy.npz")
    for table in ("operators", "storages", "events", "spans", "copies", "waits"):
        for name, column in getattr(tape, table).columns().items():
            np.testing.assert_array_equal(column, getattr(getattr(loaded, table), name))
            assert column.dtype == getattr(getattr(loaded, table), name).dtype
    for name in (
        "target",
        "versions",
        "traced_for",
        "strings",
        "assumptions",
        "host_peak_bytes",
        "random_operators",
        "operators_of_steps",
    ):
        assert getattr(tape, name) == getattr(loaded, name)
    assert [p.name for p in tmp_path.iterdir()] == ["toy.npz"]


def test_what_is_no_tape_is_refused_in_one_line(tmp_path):
    path = tmp_path / "bad.npz"
    path.write_bytes(b"PK\x03\x04 not a tape")
    with pytest.raises(RecordingError, match=r"bad\.npz is not a tape"):
        Tape.load(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"new_of_next_year": 1}, "no tape of this version .*new_of_next_year"),
        ({"effects": [{"module": "", "kind": "of next year", "what": "is"}]}, "no tape of this version .*of next year"),
        ({"schema": 2}, "another schema"),
    ],
)
def test_a_tape_of_another_version_is_refused_in_one_line(tmp_path, change, said):
    path = tmp_path / "toy.npz"
    small_tape().save(path)
    with np.load(path) as arrays:
        parts = dict(arrays)
    head = json.loads(parts["head"].tobytes()) | change
    np.savez(path, **parts | {"head": np.frombuffer(json.dumps(head).encode(), dtype=np.uint8)})
    with pytest.raises(RecordingError, match=said):
        Tape.load(path)


def test_columns_of_different_lengths_are_named_alone():
    tape = small_tape()
    spans = dataclasses.replace(tape.spans, end=tape.spans.end[:0])
    (fault,) = verify_tape(dataclasses.replace(tape, spans=spans))
    assert "different shapes" in fault


def test_a_whole_tape_breaks_no_rule():
    assert verify_tape(small_tape()) == []


@pytest.mark.parametrize(
    ("column", "values", "complaint"),
    [
        ("storage", [0, 0, 1], "not born exactly once"),
        ("kind", [EventKind.ALLOCATE, EventKind.FREE, EventKind.ALLOCATE], "freed before it is born"),
        ("operator", [1, 0, 0], "go back"),
        ("storage", [0, 1, 9], "does not exist"),
    ],
)
def test_broken_events_are_named(column, values, complaint):
    tape = small_tape()
    events = dataclasses.replace(tape.events, **{column: np.asarray(values, dtype=getattr(tape.events, column).dtype)})
    assert any(complaint in fault for fault in verify_tape(dataclasses.replace(tape, events=events)))


@pytest.mark.parametrize(
    ("table", "column", "values", "complaint"),
    [
        ("copies", "operator", [1], "a copy of an operator that does not exist"),
        ("copies", "direction", [4], "no CopyDirection"),
        ("copies", "num_bytes", [-1], "negative number of bytes"),
        ("waits", "operator", [1, 1, 0], "waits go back"),
        ("waits", "operator", [0, 1, 2], "a wait among operators that do not exist"),
        ("waits", "event", [-1, 70_000, -1], "without the event"),
        ("waits", "event", [70_000, 70_000, 4], "another with one"),
        ("waits", "stream", [-1, -1, 0], "without the stream"),
        ("waits", "kind", [0, 2, 8], "no WaitKind"),
    ],
)
def test_broken_copies_and_waits_are_named(table, column, values, complaint):
    tape = small_tape()
    rows = getattr(tape, table)
    broken = dataclasses.replace(rows, **{column: np.asarray(values, dtype=getattr(rows, column).dtype)})
    assert any(complaint in fault for fault in verify_tape(dataclasses.replace(tape, **{table: broken})))


@pytest.mark.parametrize(
    ("steps", "complaint"),
    [(((0, 2),), "outside the operators"), (((1, 0),), "overlap"), (((0, 0), (0, 1)), "more or fewer steps")],
)
def test_broken_steps_are_named(steps, complaint):
    faults = verify_tape(dataclasses.replace(small_tape(), operators_of_steps=steps))
    assert any(complaint in fault for fault in faults)


def test_a_tape_from_before_copies_and_waits_were_recorded_has_none(tmp_path):
    small_tape().save(tmp_path / "new.npz")
    with np.load(tmp_path / "new.npz") as arrays:
        old = {name: arrays[name] for name in arrays.files if not name.startswith(("copies.", "waits."))}
    head = json.loads(old["head"].tobytes())
    del head["operators_of_steps"]
    old["head"] = np.frombuffer(json.dumps(head).encode(), dtype=np.uint8)
    np.savez(tmp_path / "old.npz", **old)
    tape = read_tape(tmp_path / "old.npz")
    assert (len(tape.operators), len(tape.copies), len(tape.waits), tape.operators_of_steps) == (1, 0, 0, ())


def test_the_tape_of_the_steps_ends_with_their_copies_and_waits():
    tape = small_tape()
    assert len(tape.of_steps().waits) == 3
    spans = Spans.from_columns({"name": [5], "kind": [SpanKind.STEP], "begin": [0], "end": [1]})
    events = dataclasses.replace(tape.events, operator=np.asarray([0, 0, 1], dtype=np.int32))
    before = dataclasses.replace(tape, spans=spans, events=events).of_steps()
    assert (len(before.operators), len(before.copies), before.waits.kind.tolist()) == (0, 0, [WaitKind.RECORD])


def test_a_file_whose_tape_breaks_a_rule_is_not_read(tmp_path):
    tape = small_tape()
    tape.save(tmp_path / "whole.npz")
    assert len(read_tape(tmp_path / "whole.npz").events) == len(tape.events)
    events = dataclasses.replace(tape.events, operator=np.asarray([1, 0, 0], dtype=tape.events.operator.dtype))
    dataclasses.replace(tape, events=events).save(tmp_path / "broken.npz")
    with pytest.raises(
        RecordingError, match=r"broken\.npz is not a valid tape: events go back .*; trace the program again"
    ):
        read_tape(tmp_path / "broken.npz")
