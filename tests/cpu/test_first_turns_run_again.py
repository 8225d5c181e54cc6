"""An evaluation at step 0 runs before there are optimizer states; the same one at step 500 stands beside them, and the verdict says so where it would need more."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tightfit import estimate
from tightfit.capture.child_process import time_after_steps
from tightfit.capture.child_process.time_after_steps import TimeAfterSteps
from tightfit.reports.verdicts import verdict_words

PROGRAM = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)).cuda()
optimizer = torch.optim.AdamW(model.parameters())


def evaluate():
    with torch.no_grad():
        model(torch.randn(ROWS, 512, device="cuda"))


for i in range(NUM_TURNS):
    if CONDITION:
        evaluate()
    loss = model(torch.randn(64, 512, device="cuda")).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def estimated(folder: Path, condition: str, *, rows: int = 1 << 14, num_turns: int = 1000, **settings: Any) -> Any:
    script = folder / "train.py"
    text = PROGRAM.replace("CONDITION", condition).replace("NUM_TURNS", str(num_turns)).replace("ROWS", str(rows))
    script.write_text(text)
    return estimate(str(script), "RTX 4090", **settings)


def test_a_larger_evaluation_of_a_later_turn_is_named_with_what_it_will_hold(tmp_path: Path) -> None:
    found = estimated(tmp_path, "i % 5 == 0")
    assert verdict_words(found)[0] == "fits as far as seen"
    whole = estimated(tmp_path, "i % 5 == 0", num_turns=6, steps=6)
    assert verdict_words(whole)[0] == "fits"
    assert found.peak.allocated_bytes < whole.peak.allocated_bytes
    said = re.search(
        r"evaluate\(\) again, then with about ([\d.]+) MiB allocated, at \S*train.py:16 \(if i % 5 == 0\)$",
        found.coverage.words,
    )
    assert said is not None
    assert float(said[1]) == pytest.approx(whole.peak.allocated_bytes / (1 << 20), rel=0.01)


IN_A_BRANCH = """
for epoch in range(10):
    if epoch % 2 == 0:
        with torch.inference_mode():
            model(torch.randn(1 << 14, 512, device="cuda"))
    for i in range(100):
        loss = model(torch.randn(64, 512, device="cuda")).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
IN_A_METHOD = """
class Run:
    def evaluate(self):
        with torch.no_grad():
            model(torch.randn(1 << 14, 512, device="cuda"))

    def turn(self, i):
        if i % 5 == 0:
            self.evaluate()
        loss = model(torch.randn(64, 512, device="cuda")).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def __call__(self):
        for i in range(1000):
            self.turn(i)


Run()()
"""


@pytest.mark.parametrize(
    ("program", "call", "condition"),
    [(IN_A_METHOD, "self.evaluate()", "if i % 5 == 0"), (IN_A_BRANCH, "model()", "if epoch % 2 == 0")],
)
def test_one_in_a_method_or_in_a_loop_around_is_named_too(
    tmp_path: Path, program: str, call: str, condition: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM[: PROGRAM.index("def evaluate")] + program)
    words = estimate(str(script), "RTX 4090").coverage.words
    assert f"not reached: {call} again, then with about 120.4 MiB allocated" in words
    assert words.endswith(f"({condition})")


@pytest.mark.parametrize(
    ("condition", "rows"), [("i % 5 == 0", 64), ("i == 0", 1 << 14), ("i % 2 == 0", 1 << 14), ("True", 1 << 14)]
)
def test_one_that_needs_no_more_or_does_not_come_again_or_was_seen_is_not(
    tmp_path: Path, condition: str, rows: int
) -> None:
    assert verdict_words(estimated(tmp_path, condition, rows=rows))[0] == "fits"


class Host:
    """A host whose clock goes on by itself, and whose program runs operators or computes as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, stopped_before: str = "") -> None:
        self.now, self.busy, self.why, self.next = 10.0, 0.0, "", 0.0
        self.recorder = SimpleNamespace(num_operators=100)
        after: Any = SimpleNamespace(follows=SimpleNamespace(stopped=stopped_before), must_stop="", stop=self.stop)
        watch: Any = SimpleNamespace(after=after, has_ended=False, gpu=SimpleNamespace(recorder=self.recorder))
        monkeypatch.setattr(time_after_steps.signal, "setitimer", lambda _, seconds: setattr(self, "next", seconds))
        self.time = TimeAfterSteps(
            watch=watch, timeout_seconds=120, began=9.0, clock=lambda: self.now, processor=lambda: self.busy
        )
        self.time.begin()

    def stop(self, why: str) -> None:
        self.why = why

    def until_stopped(self, *, operators: int = 0, share: float = 0.0) -> float:
        while not self.why:
            self.now += self.next
            self.busy += self.next * share
            self.recorder.num_operators += operators
            self.time.alarm(None)
        return self.now - 10


def test_a_program_that_waits_for_others_alone_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    assert host.until_stopped() == 12
    assert host.why == "it waited, and nothing ran for 12 s"
    # The same program with a plan comes to the same place.
    assert Host(monkeypatch, stopped_before=host.why).until_stopped() == 2


@pytest.mark.parametrize("busy", [{"operators": 1}, {"share": 0.9}])
def test_one_that_works_has_all_of_the_time(monkeypatch: pytest.MonkeyPatch, busy: dict[str, Any]) -> None:
    host = Host(monkeypatch)
    assert 119 <= host.until_stopped(**busy) <= 121
    assert host.why == "stopped after 120 s"
