"""Training steps that leave more and more allocated are named; a prefetcher's batches and names that are bound anew are not."""

from types import SimpleNamespace

import pytest
import torch

from tightfit.capture.after_steps.frameworks import _unfrozen_later
from tightfit.capture.after_steps.growing_steps import growth_of_steps
from tightfit.capture.observe.recorder import Recorder
from tightfit.tape import Category, NotReached, SpanKind


def grown(*, kept_for: int, num_bytes: int = 4096, num_steps: int = 3, grows_by: int = 0) -> NotReached | None:
    """What is said of steps whose output lives for as many steps as `kept_for`, of `grows_by` more bytes in each step."""
    recorder = Recorder()
    name, line = recorder.strings.intern("aten.mm"), recorder.strings.intern("train.py:5")
    alive: list[int] = []

    def made(size: int) -> int:
        recorder.operator(name, name, line, 0, 0, 0, 0)
        return recorder.allocate(size, Category.ACTIVATIONS)

    recorder.span("set-up", SpanKind.SETUP)
    alive.append(made(1 << 20))
    for _ in range(kept_for if kept_for < 10 else 0):
        # What a prefetcher has in its queue before the first step.
        alive.append(made(num_bytes))
    for step in range(num_steps):
        recorder.span(f"step {step + 1}", SpanKind.STEP)
        alive.append(made(num_bytes + step * grows_by))
        if kept_for < 10:
            recorder.free(alive.pop(1))
    return growth_of_steps(recorder, alive, "train.py:4")


def test_what_each_step_leaves_is_named() -> None:
    found = grown(kept_for=100)
    assert found is not None
    assert found.words == (
        "steps after the first 3 at train.py:4 (each leaves 4.0 KiB more allocated, made at train.py:5)"
    )


def test_what_is_made_anew_and_larger_in_each_step_is_named() -> None:
    found = grown(kept_for=1, grows_by=2048)
    assert found is not None
    assert found.condition == "each leaves 2.0 KiB more allocated, made at train.py:5"


@pytest.mark.parametrize(
    "settings",
    [
        {"kept_for": 1},
        {"kept_for": 2},
        {"kept_for": 3},
        {"kept_for": 100, "num_bytes": 512},
        {"kept_for": 100, "num_steps": 2},
        {"kept_for": 1, "grows_by": 64},
    ],
)
def test_what_is_bound_anew_or_waits_in_a_queue_is_not(settings: dict[str, int]) -> None:
    assert grown(**settings) is None


@pytest.mark.parametrize(("is_frozen", "told"), [(True, "what Finetuning unfreezes"), (False, "")])
def test_a_callback_that_unfreezes_later_is_named(is_frozen: bool, told: str) -> None:
    callback = type("Finetuning", (), {"finetune_function": None})()
    module = torch.nn.Linear(2, 2).requires_grad_(not is_frozen)
    assert _unfrozen_later(SimpleNamespace(callbacks=[object(), callback], lightning_module=module)) == told
