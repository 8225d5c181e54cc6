"""From what a recorder brings home to marks: steps, modules, and what each block was for."""

from typing import Any

import numpy as np
import pytest

from tightfit.devices.cublas_workspaces import DEFAULT_CUBLAS_BYTES
from tightfit.recordings.classify import classify
from tightfit.recordings.marks import KEY, Marks
from tightfit.recordings.notes import PlacedNote, modules_of, steps_of
from tightfit.recordings.runs import snapshot_of_card_run, snapshot_of_host_run
from tightfit.runtime import recorded
from tightfit.runtime.recorded import (
    ASIDE,
    BACKWARD,
    BY_OPTIMIZER,
    BY_USER,
    FORWARD,
    NOTE_PREFIX,
    OPTIMIZER,
    OTHER,
    CardRun,
    HostEvent,
    HostRun,
    Note,
)
from tightfit.simulate.history import CATEGORIES

CUBLAS_BYTES = int(np.asarray(DEFAULT_CUBLAS_BYTES).flat[0])


def note(kind: Any, text: str = "", event: int = 0, *, held: dict[str, list[int]] | None = None) -> PlacedNote:
    named = tuple((category, tuple(addresses)) for category, addresses in (held or {}).items())
    return PlacedNote(note=Note(kind=kind, text=text, time_us=event, held=named), event=event, held=named)


def alloc(address: int, size: int = 512) -> dict[str, Any]:
    return {"action": "alloc", "addr": address, "size": size}


def free(address: int) -> dict[str, Any]:
    return {"action": "free_requested", "addr": address, "size": 512}


def turn(begin: int, end: int, who: str = BY_OPTIMIZER) -> list[PlacedNote]:
    """A forward and a backward pass and an optimizer, which all begin at event `begin`; the step is over before `end`."""
    phases = [note("phase", text, begin) for text in (FORWARD, OTHER, BACKWARD, OTHER, OPTIMIZER)]
    return [*phases, note("phase", OTHER, end), note("step", who, end)]


@pytest.mark.parametrize(
    ("notes", "num_events", "was_cut_short", "spans"),
    [
        ([*turn(2, 5), *turn(5, 9)], 9, False, [("set-up", 0, 2), ("step 1", 2, 5), ("step 2", 5, 9)]),
        (turn(0, 5), 7, False, [("step 1", 0, 5), ("after the last step", 5, 7)]),
        ([*turn(0, 5), note("phase", FORWARD, 6)], 9, True, [("step 1", 0, 5), ("step 2", 5, 9)]),
        (turn(0, 5), 7, True, [("step 1", 0, 5), ("after the last step", 5, 7)]),
        ([*turn(1, 4), note("step", BY_USER, 6)], 6, False, [("set-up", 0, 1), ("step 1", 1, 6)]),
        ([note("phase", BACKWARD, 1), note("phase", OTHER, 3)], 3, False, [("set-up", 0, 1), ("step 1", 1, 3)]),
        ([note("phase", ASIDE, 2), note("phase", OTHER, 3)], 4, False, [("set-up", 0, 4)]),
        ([], 0, False, []),
    ],
    ids=["optimizer", "rest", "cut in a pass", "cut between", "user", "by hand", "inference", "empty"],
)
def test_steps(notes: list[PlacedNote], num_events: int, was_cut_short: bool, spans: list[Any]) -> None:
    found = steps_of(notes, num_events, was_cut_short=was_cut_short)
    assert [(span.name, span.begin, span.end) for span in found] == spans


def test_an_allocation_belongs_to_the_module_that_was_entered_last() -> None:
    trace = [alloc(1), alloc(2), free(1), alloc(3), alloc(4)]
    notes = [note("module", "Model", 1), note("module", "Model.a", 3), note("module", "", 4)]
    events, values, modules = modules_of(trace, notes)
    assert [(event, modules[value]) for event, value in zip(events, values, strict=True)] == [
        (1, "Model"),
        (3, "Model.a"),
    ]


def test_what_a_block_was_for_follows_from_its_birth_and_its_death() -> None:
    trace = [
        alloc(1),  # before the forward pass, and there when it begins
        alloc(2),  # in the forward pass, and there when the backward pass begins
        *(alloc(3), free(3)),  # in the forward pass only
        *(alloc(4), alloc(5), free(5), free(2)),  # in the backward pass: a gradient, and for the moment
        *(alloc(6), free(4)),  # in the optimizer: a state
    ]
    notes = [
        *(note("phase", FORWARD, 1), note("phase", OTHER, 4)),
        *(note("phase", BACKWARD, 4), note("phase", OTHER, 8)),
        *(note("held", event=8, held={"gradients": [4]}), note("phase", OPTIMIZER, 8)),
        *(note("phase", OTHER, 9), note("held", event=9, held={"optimizer_state": [6], "parameters": [9]})),
    ]
    events, categories, addresses, start = classify(trace, [8, 9], notes, [9])
    found = {event: CATEGORIES[category] for event, category in zip(events, categories, strict=True)}
    assert found == {
        0: "inputs",
        1: "activations",
        2: "temporaries",
        4: "gradients",
        5: "temporaries",
        8: "optimizer_state",
    }
    assert [(a, CATEGORIES[c]) for a, c in zip(addresses, start, strict=True)] == [(9, "parameters")]


def test_activations_of_a_pass_that_was_cut_short_are_activations() -> None:
    _, categories, _, _ = classify([alloc(1), alloc(2)], [], [note("phase", FORWARD, 1)], [])
    assert [CATEGORIES[category] for category in categories] == ["inputs", "activations"]


def test_a_block_that_stays_for_whole_steps_is_a_workspace_where_it_has_its_size() -> None:
    trace = [alloc(1, CUBLAS_BYTES), alloc(2, 4000), alloc(3, 1), alloc(4, 1), alloc(5, 1)]
    notes = [note("phase", FORWARD, 0), note("phase", BACKWARD, 2), *turn(3, 4), *turn(4, 5)]
    events, categories, _, _ = classify(trace, [], notes, [3, 4, 5])
    found = {event: CATEGORIES[category] for event, category in zip(events, categories, strict=True)}
    assert found[0] == "workspace"
    assert 1 not in found


def test_what_each_forward_pass_leaves_is_an_activation_that_is_kept() -> None:
    # Of each of five steps one of its size; and one that the second step alone has left.
    trace = [alloc(1, 4000), alloc(2, 4000), alloc(3, 700), alloc(4, 4000), alloc(5, 4000), alloc(6, 4000)]
    ends = (1, 3, 4, 5, 6)
    notes = [each for begin, end in zip((0, *ends), ends, strict=False) for each in forward_and_backward(begin, end)]
    events, categories, _, _ = classify(trace, [], notes, ends)
    found = {event: CATEGORIES[category] for event, category in zip(events, categories, strict=True)}
    assert found == dict.fromkeys((0, 1, 3, 4, 5), "activations")


def forward_and_backward(begin: int, end: int) -> list[PlacedNote]:
    return [note("phase", FORWARD, begin), note("phase", BACKWARD, end), note("phase", OTHER, end)]


def snapshot(trace: list[dict[str, Any]]) -> dict[str, Any]:
    blocks = [{"size": 512, "state": "active_allocated", "requested_size": 512, "frames": []}]
    segment = {"device": 1, "address": 4096, "total_size": 512, "blocks": blocks}
    return {"segments": [segment], "device_traces": [[], trace], "allocator_settings": {}, "external_annotations": []}


def card_run(trace: list[dict[str, Any]], notes: list[Note], *, has_dropped_events: bool = False) -> CardRun:
    return CardRun(
        snapshot=snapshot(trace),
        index=1,
        device="a card",
        capacity_bytes=1 << 30,
        context_bytes=1 << 20,
        notes=notes,
        has_dropped_events=has_dropped_events,
    )


NOTES = [
    Note(kind="phase", text=FORWARD, time_us=15, held=()),
    Note(kind="module", text="Model", time_us=16, held=()),
    Note(kind="held", text="", time_us=26, held=(("parameters", (4096,)),)),
    Note(kind="step", text=BY_OPTIMIZER, time_us=27, held=()),
]


@pytest.mark.parametrize(
    "stamps",
    [["", f"{NOTE_PREFIX}1", "", f"{NOTE_PREFIX}3"], ["", "", "", ""]],
    ids=["by stamp, one of another thread", "by time"],
)
def test_a_cards_snapshot_gets_marks_and_stays_otherwise_as_it_was(stamps: list[str]) -> None:
    trace = [
        {**alloc(at * 512), "time_us": at * 10, "user_metadata": stamp, "stream": 7}
        for at, stamp in enumerate(stamps, start=1)
    ]
    written, marks = snapshot_of_card_run(card_run(trace, NOTES), was_cut_short=False)
    assert [(span.name, span.begin, span.end) for span in marks.spans] == [
        ("set-up", 0, 1),
        ("step 1", 1, 2 if not any(stamps) else 3),
        ("after the last step", 2 if not any(stamps) else 3, 4),
    ]
    assert (marks.origin, marks.trace, marks.device, marks.context_bytes) == ("card", 1, "a card", 1 << 20)
    assert (marks.start_addresses.tolist(), marks.start_categories.tolist()) == ([4096], [0])
    assert [event["user_metadata"] for event in trace][1] == "Model"
    assert not any(event["user_metadata"].startswith(NOTE_PREFIX) for event in trace)
    assert all(event["stream"] == 7 for event in trace)
    assert Marks.from_plain(written[KEY]).modules == ("Model",)
    assert {"name": "step 1", "stage": "START", "device": 1, "time_us": 20} in written["external_annotations"]


def test_stacks_are_without_the_recorders_own_frames() -> None:
    user, own = ({"filename": file, "line": 1, "name": "f"} for file in ("train.py", recorded.__file__))
    shared = [own, user, own]
    trace = [{**alloc(at), "frames": shared, "user_metadata": "", "time_us": 0} for at in range(2)]
    snapshot_of_card_run(card_run(trace, []), was_cut_short=False)
    assert [event["frames"] for event in trace] == [[user], [user]]


def test_addresses_from_before_the_kept_events_are_not_taken_for_later_ones() -> None:
    trace = [{**alloc(1), "time_us": 90, "user_metadata": ""}]
    _, marks = snapshot_of_card_run(card_run(trace, NOTES, has_dropped_events=True), was_cut_short=False)
    assert marks.start_addresses.tolist() == []
    assert "only the last 1 events" in marks.assumptions[0].what


def test_only_the_last_events_of_the_host_are_kept_and_the_rest_is_its_start() -> None:
    allocations = [HostEvent(storage=at, num_bytes=700, stack=0, time_us=at) for at in range(9)]
    end = Note(kind="held", text="", time_us=9, held=(("parameters", (0, 8)),))
    run = HostRun(events=[*allocations, end], num_at_start=2, stacks=[[]])
    written, marks = snapshot_of_host_run(run, max_events=3, was_cut_short=False)
    (trace,) = written["device_traces"]
    (segment,) = written["segments"]
    assert [event["action"] for event in trace] == ["alloc"] * 3
    assert segment["allocated_size"] == 9 * 1024
    assert len(marks.start_addresses) == 1
    assert marks.category_of_events(3).tolist()[2] == CATEGORIES.index("parameters")
    assert "only the last 3 events" in marks.assumptions[1].what
