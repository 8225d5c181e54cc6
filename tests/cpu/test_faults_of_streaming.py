"""Faults while weights stream: a copy that fails at any place, an interrupt, a copying thread that is gone, a fork. Weights are what they were, the next step is
right, and nothing is left over."""

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.conformance.large_models import Decoder
from tests.cpu import test_streamed_predictions as predictions
from tests.cpu import test_technique_trained_weight_streaming as trained
from tests.cpu.training_loops import Optimizer, gradients, tokens, train
from torch import nn

from tightfit.engine.copy_engines import HostCopies
from tightfit.engine.weights import streamed_weights
from tightfit.techniques.session import Session

# What the copies of one step are: more than these are not begun, waited for or finished in one.
NUM_CALLS = 100


class FaultError(RuntimeError):
    """As a driver raises it."""


@contextmanager
def failing_at(number: int, error: type[BaseException]) -> Iterator[list[int]]:
    """The `number`-th call of the copies, of whatever kind, raises; the list has how many calls there were."""
    calls = [0]
    kept = {name: getattr(HostCopies, name) for name in ("begin", "wait", "finish")}

    def counted(name: str) -> Callable[..., Any]:
        def call(self: HostCopies, *args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == number:
                raise error("injected")
            return kept[name](self, *args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in kept:
            patch.setattr(HostCopies, name, counted(name))
        yield calls


def pair() -> tuple[Decoder, Decoder, Optimizer, Optimizer, Session]:
    return trained.pair()  # type: ignore[return-value]


@pytest.mark.parametrize("error", [FaultError, KeyboardInterrupt])
def test_wherever_a_copy_fails_in_a_step_the_weights_are_whole_and_the_next_step_is_right(
    error: type[BaseException],
) -> None:
    plain, model, *optimizers, session = pair()
    for number in range(1, NUM_CALLS, 5 if error is FaultError else 7):
        train(plain, optimizers[0], number)
        train(model, optimizers[1], number)
        with failing_at(number, error) as calls:
            optimizers[1].zero_grad()
            try:
                model(tokens(number)).backward()
            except error:
                pass
            else:
                assert calls[0] < number
        assert trained.same(plain.parameters(), model.parameters())
    assert torch.equal(train(plain, optimizers[0], 99), train(model, optimizers[1], 99))
    assert trained.same(gradients(plain), gradients(model))
    session.undo()
    assert trained.same(plain.parameters(), model.parameters())


def test_wherever_a_copy_fails_in_a_prediction_the_next_one_is_right() -> None:
    plain, model = predictions.small(), predictions.small()
    session = predictions.streamed(model)
    for number in range(1, 24):
        with failing_at(number, FaultError), pytest.raises(FaultError):
            predictions.predicted(model)
        assert predictions.same(list(plain.parameters()), list(model.parameters()))
        assert torch.equal(predictions.predicted(plain), predictions.predicted(model))
    session.undo()
    assert predictions.same(list(plain.parameters()), list(model.parameters()))


def test_a_copying_thread_that_is_gone_is_an_error_and_undoing_brings_the_weights_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, model, *optimizers, session = pair()
    train(plain, optimizers[0], 0)
    train(model, optimizers[1], 0)

    def begin(*_: Any, **__: Any) -> None:
        raise RuntimeError("cannot schedule new futures after shutdown")

    with monkeypatch.context() as patch:
        patch.setattr(HostCopies, "begin", begin)
        optimizers[1].zero_grad()
        with pytest.raises(RuntimeError, match="after shutdown"):
            model(tokens(1))
        session.undo()
    assert trained.same(plain.parameters(), model.parameters())
    assert not any(trained.is_away(parameter) for parameter in model.parameters())
    assert torch.equal(train(plain, optimizers[0], 2), train(model, optimizers[1], 2))


@pytest.mark.parametrize("where", ["forward", "backward", "gradient"])
def test_a_hook_that_raises_leaves_the_weights_as_they_are(where: str) -> None:
    plain, model, *optimizers, session = pair()

    def fail(*_: Any) -> None:
        raise ValueError("of the program")

    for each, optimizer in zip((plain, model), optimizers, strict=True):
        block: nn.Module = each.blocks[2]
        handle = {
            "forward": block.register_forward_hook,
            "backward": block.register_full_backward_hook,
            "gradient": each.blocks[2].up.weight.register_post_accumulate_grad_hook,
        }[where](fail)
        with pytest.raises(ValueError, match="of the program"):
            train(each, optimizer, 0)
        handle.remove()
    assert trained.same(gradients(plain), gradients(model))
    assert trained.same(plain.parameters(), model.parameters())
    # What was half done is added to, as in the plain run.
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        each(tokens(1)).backward()
        optimizer.step()
    assert trained.same(gradients(plain), gradients(model))
    session.undo()
    assert trained.same(plain.parameters(), model.parameters())


def test_a_fork_trains_on_by_itself() -> None:
    plain, model, *optimizers, session = pair()
    train(plain, optimizers[0], 0)
    train(model, optimizers[1], 0)
    pid = os.fork()
    if not pid:
        # Without pytest's handlers: only what it found is told.
        is_right = False
        try:
            is_right = torch.equal(train(plain, optimizers[0], 1), train(model, optimizers[1], 1))
        finally:
            os._exit(0 if is_right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert torch.equal(train(plain, optimizers[0], 2), train(model, optimizers[1], 2))
    session.undo()


def test_nothing_is_left_over(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[object]] = []

    def noting(kind: type) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            found = kind(*args, **kwargs)
            made.append(weakref.ref(found))
            return found

        return make

    # The host memory, and the copies with their thread, which ends when they are gone.
    monkeypatch.setattr(streamed_weights, "HostSlab", noting(streamed_weights.HostSlab))
    monkeypatch.setattr(streamed_weights, "copies_for", noting(streamed_weights.copies_for))  # type: ignore[arg-type]
    for number in range(3):
        model = trained.small()
        optimizer = trained.adamw(model)
        session = trained.streamed(model, optimizer)
        train(model, optimizer, number)
        with failing_at(5, FaultError), pytest.raises(FaultError):
            train(model, optimizer, number)
        session.undo()
        del model, optimizer, session
    gc.collect()
    assert len(made) == 6 and not any(reference() is not None for reference in made)
