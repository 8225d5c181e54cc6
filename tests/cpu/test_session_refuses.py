"""A session that has refused something lets nothing be trained until it is undone, whatever the program does with the error."""

import pytest
import torch
from tests.cpu.applied import CHOICES, batch_of, made, train

from tightfit.errors import ApplyError
from tightfit.runtime.apply import apply_choices
from tightfit.techniques.session import Session


def _weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_failed_session_raises_its_first_error_again_at_each_forward_and_step() -> None:
    model, optimizer = made()
    session = apply_choices(CHOICES, model, [optimizer])
    before = _weights(model)
    with pytest.raises(ApplyError, match="the first"):
        raise session.refuse("the first", technique="checkpointing", places=("Net.layers.0",))
    assert str(session.refuse("the second")) == "the first"
    for attempt in (lambda: model(batch_of(0)[0]), optimizer.step, lambda: train(model, optimizer)):
        with pytest.raises(ApplyError, match="the first") as raised:
            attempt()
        assert (raised.value.technique, raised.value.places) == ("checkpointing", ("Net.layers.0",))
        assert raised.value.__cause__ is session.verdict.failure
    assert torch.equal(_weights(model), before)


def test_a_failed_session_still_evaluates() -> None:
    model, optimizer = made()
    session = apply_choices(CHOICES, model, [optimizer])
    session.refuse("no")
    with torch.no_grad():
        assert model(batch_of(0)[0]).shape[0] == len(batch_of(0)[0])


def test_undo_lets_a_failed_model_train_again() -> None:
    plain = train(*made())
    model, optimizer = made()
    session = apply_choices(CHOICES, model, [optimizer])
    session.refuse("no")
    session.undo()
    assert session.verdict.failure is None
    assert "forward" not in vars(model) and not optimizer._optimizer_step_pre_hooks
    assert train(model, optimizer) == plain


def test_the_guard_comes_before_hooks_that_the_program_registered_earlier() -> None:
    model, optimizer = made()
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("user"))
    session = apply_choices(CHOICES, model, [optimizer])
    session.refuse("no")
    with pytest.raises(ApplyError, match="no"):
        optimizer.step()
    assert not seen


def test_a_refusal_within_a_backward_pass_blocks_what_follows_when_it_is_swallowed() -> None:
    model, optimizer = made()
    session = apply_choices(CHOICES, model, [optimizer])
    before = _weights(model)

    def refuse(_: torch.Tensor) -> None:
        raise session.refuse("the gradient is wanted elsewhere")

    model.head.weight.register_post_accumulate_grad_hook(refuse)
    errors = []
    for step in range(3):
        try:
            train(model, optimizer, range(step, step + 1))
        except ApplyError as error:
            errors.append(str(error))
        try:
            optimizer.step()
        except ApplyError as error:
            errors.append(str(error))
    assert errors == ["the gradient is wanted elsewhere"] * 6
    assert torch.equal(_weights(model), before)


def test_a_session_is_guarded_once() -> None:
    model, optimizer = made()
    with Session(model=model, optimizers=[optimizer]) as session:
        session.guard()
        session.guard()
        assert len(optimizer._optimizer_step_pre_hooks) == 1
