"""How a card is recorded: which private functions of torch are called, and what becomes of what they give. The card is a stand-in."""

import dataclasses
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tightfit
from tightfit.recordings.marks import KEY, Marks
from tightfit.runtime import record_card
from tightfit.runtime.record_card import CardRecorder
from tightfit.runtime.run_recorder import new_recorder


class StandIn:
    """A card whose allocator hands out 512 bytes whenever the text that it stamps on its events changes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.metadata = "the user's own"
        self.calls: list[tuple[Any, ...]] = []
        self.trace: list[dict[str, Any]] = []
        memory = torch.cuda.memory
        monkeypatch.setattr(memory, "_record_memory_history", self.record_history)
        monkeypatch.setattr(memory, "_snapshot", self.snapshot)
        monkeypatch.setattr(memory, "_set_memory_metadata", self.set_metadata)
        monkeypatch.setattr(memory, "_get_memory_metadata", lambda: self.metadata)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _index: (600, 1000))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _index: 150)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _index: "a stand-in")

    def record_history(self, enabled: str | None, **options: Any) -> None:
        self.calls.append((enabled, options))

    def set_metadata(self, text: str) -> None:
        self.metadata = text
        event = {"action": "alloc", "addr": 512 * len(self.trace), "size": 512, "stream": 0, "time_us": 7}
        self.trace.append({**event, "frames": [], "user_metadata": text})

    def snapshot(self) -> dict[str, Any]:
        return {"segments": [], "device_traces": [list(self.trace)], "allocator_settings": {}}


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return StandIn(monkeypatch)


def test_a_card_is_preferred_to_the_host(card: StandIn) -> None:
    assert isinstance(new_recorder(stacks=True, max_events=9), CardRecorder)


@pytest.mark.parametrize("stacks", [True, False])
def test_torchs_recorder_runs_from_start_to_end_and_what_the_user_had_set_is_set_again(
    card: StandIn, stacks: bool, tmp_path: Path
) -> None:
    with tightfit.record(tmp_path / "x.pickle", stacks=stacks, max_events=50_000):
        assert len(card.calls) == 1
    (begin, options), (end, _) = card.calls
    assert (begin, end) == ("all", None)
    assert options == {
        "context": "alloc" if stacks else None,
        "stacks": "python",
        "max_entries": 50_000,
        "clear_history": True,
    }
    assert card.metadata == "the user's own"


def test_before_torch_2_10_events_have_no_text_and_are_told_by_their_times(
    card: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GET_STAMP", "SET_STAMP"):
        monkeypatch.setattr(record_card, name, dataclasses.replace(getattr(record_card, name), first="99.0"))
    for name in ("_get_memory_metadata", "_set_memory_metadata"):
        monkeypatch.delattr(torch.cuda.memory, name)
    block = {"action": "alloc", "size": 512, "stream": 0, "frames": []}
    with tightfit.record(tmp_path / "x.pickle") as recording:
        for number in range(2):
            card.trace.append(block | {"addr": 512 * number, "time_us": time.time_ns() // 1000})
            time.sleep(0.001)
            recording.step()
    marks = Marks.from_plain(pickle.loads((tmp_path / "x.pickle").read_bytes())[KEY])
    assert [(span.begin, span.end) for span in marks.spans if span.kind == "step"][:2] == [(0, 1), (1, 2)]


def test_marks_are_those_of_the_run_and_of_the_card(card: StandIn, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tightfit.record(tmp_path / "x.pickle") as recording:
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
    plain = pickle.loads((tmp_path / "x.pickle").read_bytes())
    marks = Marks.from_plain(plain[KEY])
    assert (marks.origin, marks.device, marks.capacity_bytes, marks.context_bytes) == ("card", "a stand-in", 1000, 250)
    assert [span.name for span in marks.spans if span.kind == "step"] == ["step 1", "step 2"]
    assert set(marks.modules) == {"Sequential", "Sequential.0", "Sequential.1"}
    assert {note["name"] for note in plain["external_annotations"]} >= {"step 1", "step 2"}
    assert recording.written is not None
    assert recording.written.num_events == len(plain["device_traces"][0])


def test_it_says_when_events_were_dropped(card: StandIn, tmp_path: Path) -> None:
    with tightfit.record(tmp_path / "x.pickle", max_events=3):
        torch.nn.Linear(4, 4)(torch.ones(1, 4))
    marks = Marks.from_plain(pickle.loads((tmp_path / "x.pickle").read_bytes())[KEY])
    assert "events were kept" in marks.assumptions[0].what
