"""How a guard ends: all that it has put there is taken off, and what fails in that, or in the file about a failed step, never replaces the program's own error."""

import io
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.guard import Failing
from tests.cpu import applied
from tests.cpu.guarded_scripts import Scripts
from torch.utils._python_dispatch import TorchDispatchMode

import tightfit
from tightfit.errors.ends import end_all, ended_by
from tightfit.guarding.loops.guarded_script import GuardedScript
from tightfit.guarding.loops.printed_text import PrintedText
from tightfit.guarding.memory import post_mortem
from tightfit.guarding.memory.post_mortem import PostMortem
from tightfit.guarding.state.step_gradients import StepGradients
from tightfit.guarding.told_to_end import ToldToEnd


@pytest.fixture
def scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Scripts:
    return Scripts(tmp_path, capsys, monkeypatch)


def fails() -> None:
    raise RuntimeError("no memory to take it off")


def test_a_script_that_ends_before_its_first_model_ends_with_its_own_error(scripts: Scripts) -> None:
    path = scripts.write("open('/nonexistent/data.bin')\n")
    plans = [applied.plan_of([applied.CHOICES[0]])]
    guarded = GuardedScript(str(path), plans, has_first=True, folder=scripts.folder)
    with pytest.raises(FileNotFoundError), guarded.running():
        exec(path.read_text(), {})


def test_what_fails_at_the_end_is_a_note_of_the_error_that_there_is() -> None:
    called: list[str] = []
    with pytest.raises(KeyError) as raised, ended_by(fails, lambda: called.append("last")):
        raise KeyError("of the program")
    assert called == ["last"]
    assert "no memory to take it off" in raised.value.__notes__[0]
    with pytest.raises(RuntimeError), ended_by(fails, lambda: called.append("last")):
        pass
    with pytest.raises(RuntimeError, match="no memory"):
        end_all(fails, fails, lambda: called.append("last"))
    assert called == ["last"] * 3

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), ended_by(interrupted):
        raise KeyError("of the program")


def test_all_of_a_guard_is_taken_off_where_a_plan_cannot_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        with tightfit.guard(model, optimizer, post_mortems=tmp_path) as guarded:
            monkeypatch.setattr(guarded._attempts.rungs, "end", fails)
            raise KeyError("of the program")

    with pytest.raises(KeyError):
        run()
    assert "step" not in vars(optimizer)


class Counting(torch.optim.SGD):
    """Keeps entries among its states that are no parameter's."""

    def step(self, closure: Any = None) -> Any:
        self.state["num_steps"] = self.state.get("num_steps", 0) + 1  # type: ignore[index, call-overload, operator]
        self.state.setdefault("rates", []).append(self.param_groups[0]["lr"])  # type: ignore[call-overload, attr-defined]
        return super().step(closure)


def counted(*numbers: int, folder: Path) -> list[Any]:
    model = torch.nn.Linear(4, 1)
    optimizer = Counting(model.parameters(), lr=0.1)
    for each in model.parameters():
        torch.nn.init.ones_(each)
    failing = Failing(*numbers)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        with failing, failing.counting():
            optimizer.step()
        return loss.item()

    with tightfit.guard(model, optimizer, post_mortems=folder) as guarded:
        losses = [guarded.step(step) for _ in range(3)]
    assert guarded.statistics["replays"] == bool(numbers)
    return [losses, optimizer.state["num_steps"], optimizer.state["rates"]]  # type: ignore[index]


def test_entries_of_an_optimizer_that_are_no_parameters_are_taken_back_too(tmp_path: Path) -> None:
    plain = counted(folder=tmp_path)
    assert plain[1:] == [3, [0.1] * 3]
    # Twice: as an operator, and when that is run again.
    assert counted(3, 4, folder=tmp_path) == plain


def test_the_file_about_a_step_never_replaces_its_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = Counting(model.parameters(), lr=0.1)
    optimizer.step()
    error = torch.OutOfMemoryError("CUDA out of memory.")
    mortem = PostMortem(tmp_path, lambda: [model], [optimizer])
    assert mortem.added_to(error, step=1, tried=[], why="it was the last") is error
    assert "more in" in error.__notes__[-1]
    # Of the cards those alone that this process uses.
    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 8 if index == 3 else 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    monkeypatch.setattr(post_mortem, "_counters", lambda index: asked.append(index) or {})
    mortem.added_to(error, step=2, tried=[], why="it was the last")
    assert asked == [1, 3]
    monkeypatch.setattr(torch.cuda, "empty_cache", fails)
    mortem.added_to(error, step=3, tried=[], why="it was the last")
    assert "no file was written about it" in error.__notes__[-1]


SKIPPING = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
done, skipped = 0, 0
while done < 3:
    try:
        for number in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            done += 1
    except torch.OutOfMemoryError:
        skipped += 1
"""


@pytest.mark.parametrize("method", ["begin", "succeeded"])
def test_a_turn_that_has_no_memory_for_its_copies_is_over(
    method: str, scripts: Scripts, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = scripts.write(SKIPPING)
    guarded = GuardedScript(str(path), [], has_first=False, folder=scripts.folder)
    attempts = guarded._attempts
    plain = getattr(attempts, method)
    calls: list[bool] = []

    def first_fails(*args: Any, **kwargs: Any) -> Any:
        calls.append(attempts.is_running)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return plain(*args, **kwargs)

    monkeypatch.setattr(attempts, method, first_fails)
    former = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        handler = signal.getsignal(signal.SIGTERM)
        found: dict[str, Any] = {"__name__": "__main__"}
        with guarded.running() as compiled:
            code = compiled(path.read_bytes(), str(path))
            assert code is not None
            exec(code, found)
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, former)
    assert found["skipped"] == 1
    assert not any(calls) if method == "begin" else all(calls)


def test_a_signal_whose_handler_is_not_pythons_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    former = signal.getsignal(signal.SIGTERM)
    told = ToldToEnd(lambda: None)
    with monkeypatch.context() as patched:
        patched.setattr(signal, "getsignal", lambda number: None)
        told.begin()
    told.end()
    try:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, former)


def test_what_an_attempt_has_printed_that_came_further_is_not_printed_twice() -> None:
    stream, printed = io.TextIOWrapper(io.BytesIO(), write_through=True), PrintedText()
    printed.begin(stream)
    for texts in (("one ", "two "), ("one ",), ("one ", "two ", "three")):
        printed.clear()
        for text in texts:
            stream.write(text)
        printed.stop()
        printed.again()
    printed.end()
    assert stream.buffer.getvalue() == b"one two three"  # type: ignore[attr-defined]


def test_loaders_that_are_left_early_are_dropped() -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held: list[weakref.ref[Any]] = []
    with tightfit.guard(model, optimizer) as guarded:
        for _ in range(3):
            batches = guarded.batches([torch.ones(2, 4)] * 3)
            held.append(weakref.ref(batches))

            def step(batches: Any = batches) -> None:
                optimizer.zero_grad()
                model(next(batches)).sum().backward()
                optimizer.step()

            guarded.step(step)
            del step
        assert [reference() is None for reference in held] == [True, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_gradients_that_are_zeroed_in_place_are_looked_at_without_memory(dtype: torch.dtype) -> None:
    leaf = torch.zeros(64, 32, dtype=dtype, requires_grad=True)
    for last, is_zero in ((0, True), (-1, False), (float("nan"), False), (float("inf"), False), (-0.0, True)):
        leaf.grad = torch.ones_like(leaf)
        gradients = StepGradients([leaf])
        leaf.grad.zero_()[-1, -1] = last
        with SizesOfResults() as made:
            gradients._look()
        assert made.most <= 1
        gradients.is_seen = True
        assert (gradients.obstacle() == "") == is_zero


class SizesOfResults(TorchDispatchMode):
    """The elements of the largest tensor of its own that an operator inside has made."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage()._cdata not in given:
            self.most = max(self.most, result.numel())
        return result
