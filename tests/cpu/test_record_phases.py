"""The phases of a recorded run, as the recorder's hooks note them."""

import contextlib
from pathlib import Path

import torch

import tightfit
from tightfit.runtime.record_hooks import RunHooks


class RaisesOnce(torch.optim.Optimizer):
    """As a loop has it that catches what a step raises and goes on; its step calls none of torch's, which would be a phase of its own."""

    has_raised = False

    def step(self, closure=None):
        if not self.has_raised:
            self.has_raised = True
            raise RuntimeError("once")
        return None if closure is None else closure()


def test_a_step_that_raised_ends_with_the_next_pass() -> None:
    notes: list[tuple[str, str]] = []
    hooks = RunHooks(lambda kind, text, _: notes.append((kind, text)))
    model = torch.nn.Linear(4, 4)
    optimizer = RaisesOnce(model.parameters(), {})
    hooks.install()
    try:
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            with contextlib.suppress(RuntimeError):
                optimizer.step()
        optimizer.step(lambda: model(torch.ones(2, 4)).sum())  # a closure's forward is within the step
    finally:
        hooks.remove()
    phases = [text for kind, text in notes if kind == "phase"]
    passes = ["forward", "other", "backward", "other", "optimizer", "other"]
    assert phases == [*passes, *passes, "optimizer", "other"]


def test_parameters_of_lazy_modules_are_recorded_once_they_are_made(tmp_path: Path) -> None:
    model = torch.nn.LazyLinear(256)
    with tightfit.record(tmp_path / "run.pickle") as recording:
        model(torch.ones(8, 64))
    assert recording.written is not None
    assert recording.written.num_events > 0
