"""A run on this machine's card is recorded with its steps, modules and categories. Skips where there is none."""

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import tightfit
from tightfit.recordings.marks import KEY, Marks
from tightfit.simulate.history import CATEGORIES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no card that torch can use on this machine"),
]

WEIGHT_BYTES = 1024 * 1024 * 4


def train(num_steps: int) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(4))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(num_steps):
        loss = model(torch.randn(64, 1024, device="cuda")).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def read(path: Path) -> tuple[list[dict[str, Any]], Marks]:
    plain = pickle.loads(path.read_bytes())
    marks = Marks.from_plain(plain[KEY])
    return plain["device_traces"][marks.trace], marks


def test_losses_are_the_same_and_the_allocator_is_replayed_to_the_byte(tmp_path: Path) -> None:
    plain = train(4)
    torch.cuda.empty_cache()
    with tightfit.record(tmp_path / "x.pickle") as recording:
        recorded = train(4)
    assert recorded == plain
    assert recording.written is not None
    assert (recording.written.num_steps, recording.written.origin) == (4, "card")
    assert tightfit.replay(tmp_path / "x.pickle").agrees


def test_what_lives_at_the_end_of_a_step_is_what_one_counts_by_hand(tmp_path: Path) -> None:
    with tightfit.record(tmp_path / "x.pickle"):
        train(3)
    trace, marks = read(tmp_path / "x.pickle")
    end = next(span.end for span in marks.spans if span.name == "step 2")
    categories = marks.category_of_events(len(trace)).tolist()
    alive: dict[int, str] = {}
    for category, event in zip(categories[:end], trace[:end], strict=True):
        if event["action"] == "alloc" and event["size"] == WEIGHT_BYTES:
            alive[event["addr"]] = CATEGORIES[category]
        elif event["action"] == "free_requested":
            alive.pop(event["addr"], None)
    assert Counter(alive.values()) == {"parameters": 4, "gradients": 4, "optimizer_state": 4}
    assert {"Sequential.0", "Sequential.3"} <= set(marks.modules)
    assert marks.context_bytes is not None
    assert 50 << 20 < marks.context_bytes < 4 << 30


def test_running_out_of_memory_is_recorded(tmp_path: Path) -> None:
    recording = tightfit.record(tmp_path / "x.pickle")

    def fail() -> None:
        with recording:
            train(1)
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")

    with pytest.raises(torch.OutOfMemoryError):
        fail()
    trace, marks = read(tmp_path / "x.pickle")
    assert "oom" in {event["action"] for event in trace}
    assert marks.spans[0].name in ("set-up", "step 1")
