"""Undoing a session takes off what it put on, by token, whatever happened to the objects meanwhile, and whatever fails on the way."""

import contextlib
import copy
import dis
import functools
import gc
import io
import itertools
import sys
import threading
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from tests.cpu.applied import CHOICES, Net, batch_of, choice, made, plan_of, train
from torch import nn

import tightfit
from tightfit.errors import ApplyError
from tightfit.runtime.apply import apply_choices
from tightfit.techniques.session import Session
from tightfit.techniques.wrappers.forwards import WrappedForward

ALL = (
    *CHOICES,
    choice("zero_grad", "gradients"),
    choice("empty_cache", "allocator", border="after the optimizer"),
    choice("pure_bf16", "precision", rounding="stochastic"),
)


def doubling(forward: Callable[..., Any], *args: Any) -> Any:
    return 2 * forward(*args)


class AddsOne:
    """A user's wrapper around a forward."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner = inner

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.inner(rows) + 1


def _linear() -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    layer, rows = nn.Linear(2, 2), torch.ones(1, 2)
    return layer, rows, layer(rows)


def test_a_wrapper_that_the_program_put_around_a_forward_stays() -> None:
    layer, rows, plain = _linear()
    session = Session(model=layer, optimizers=[])
    session.wrap_forward(layer, doubling)
    layer.forward = theirs = AddsOne(layer.forward)
    assert torch.equal(layer(rows), 2 * plain + 1)
    session.undo()
    assert layer.forward is theirs and torch.equal(layer(rows), plain + 1)


def test_a_forward_that_the_program_put_there_instead_stays() -> None:
    layer, rows, _ = _linear()
    session = Session(model=layer, optimizers=[])
    session.wrap_forward(layer, doubling)
    layer.forward = lambda rows: rows  # type: ignore[assignment,method-assign]
    session.undo()
    assert torch.equal(layer(rows), rows)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_sessions_of_one_model_are_undone_in_any_order(order: tuple[int, ...]) -> None:
    layer, rows, plain = _linear()
    sessions = [Session(model=layer, optimizers=[]) for _ in range(3)]
    for session in sessions:
        session.wrap_forward(layer, doubling)
    for number, index in enumerate(order):
        assert torch.equal(layer(rows), 2 ** (3 - number) * plain)
        sessions[index].undo()
    assert torch.equal(layer(rows), plain) and "forward" not in vars(layer)


def test_attributes_that_the_program_set_since_stay() -> None:
    model, optimizer = made()
    session = Session(model=model, optimizers=[optimizer])
    session.set(model, "number", 1)
    session.set(model, "other", 1)
    session.set(optimizer, "zero_grad", lambda set_to_none=True: None)
    theirs = optimizer.zero_grad
    optimizer.zero_grad = functools.partial(theirs, set_to_none=True)  # type: ignore[method-assign]
    model.number = 2
    train(model, optimizer, range(1))
    assert model.head.weight.grad is not None
    session.undo()
    assert model.number == 2 and not hasattr(model, "other") and "zero_grad" in vars(optimizer)
    optimizer.zero_grad()
    assert model.head.weight.grad is None


def test_all_steps_of_an_undo_are_taken_and_the_first_error_is_told_with_the_others() -> None:
    layer, rows, plain = _linear()
    session = Session(model=layer, optimizers=[])
    session.wrap_forward(layer, doubling)

    def fail(text: str) -> None:
        raise ValueError(text)

    session.when_undone(lambda: fail("the second"))
    session.when_undone(lambda: fail("the first"))
    with pytest.raises(ValueError, match="the first") as raised:
        session.undo()
    assert raised.value.__notes__ == ["and while undoing: ValueError: the second"]
    assert torch.equal(layer(rows), plain)
    session.undo()


def test_an_interrupt_while_undoing_is_told_when_all_is_undone() -> None:
    layer, rows, plain = _linear()
    session = Session(model=layer, optimizers=[])
    session.wrap_forward(layer, doubling)
    calls = []

    def interrupted() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt

    session.when_undone(interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.undo()
    assert len(calls) == 2 and torch.equal(layer(rows), plain)


def test_what_is_left_of_an_undone_session_refuses_and_blocks_nothing() -> None:
    model, optimizer = made()
    session = apply_choices(CHOICES, model, [optimizer])
    session.undo()
    with pytest.raises(ApplyError, match="late"):
        raise session.refuse("late")
    assert train(model, optimizer) == train(*made())


def _objects(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What of a model and its optimizer is compared by identity, and what by value."""
    own = {name: {k: id(v) for k, v in vars(module).items()} for name, module in model.named_modules()}
    hooks = {name: dict(value) for name, value in vars(optimizer).items() if name.endswith("_hooks")}
    on_leaves = {name: len(p._post_accumulate_grad_hooks or ()) for name, p in model.named_parameters()}
    values = {name: (value.dtype, value.numpy().tobytes()) for name, value in model.state_dict().items()}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return {
        "own": own,
        "hooks": hooks,
        "leaves": on_leaves,
        "values": values,
        "groups": groups,
        "of": sorted(vars(optimizer)),
    }


class Interrupt(KeyboardInterrupt):
    """One that nobody else raises."""


@functools.cache
def _without_interrupts(code: CodeType) -> frozenset[int]:
    """Where Python looks for no interrupt, and a lock would be kept: a block of `with` is left (three times None is put on the stack for `__exit__`), and the
    instruction of a line `try:`, which does nothing and belongs to no block."""
    found = list(dis.get_instructions(code))
    ends = {
        first.offset
        for first, *others in zip(found, found[1:], found[2:], strict=False)
        if all(each.opname.startswith("LOAD_CONST") and each.argval is None for each in (first, *others))
    }
    return frozenset(ends | {each.offset for each in found if each.opname == "NOP"})


@pytest.mark.by_turns(2)
def test_an_interrupt_at_any_line_of_apply_leaves_everything_as_it_was() -> None:
    plan = plan_of(ALL)
    folder = tightfit.__path__[0]

    def lines_until(stop: int, model: Net, optimizer: torch.optim.Optimizer) -> int:
        """Applies, and raises before the line of this number; how many lines there were."""
        count = 0

        def local(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal count
            if event == "line" and frame.f_lasti not in _without_interrupts(frame.f_code):
                count += 1
                if count == stop:
                    raise Interrupt
            return local

        def begun(frame: FrameType, event: str, _: Any) -> Any:
            is_ours = frame.f_code.co_filename.startswith(folder)
            # Once it has begun to undo, a second interrupt means it.
            return local if is_ours and count < stop else None

        sys.settrace(begun)
        try:
            session = tightfit.apply(plan, model, optimizer)
        finally:
            sys.settrace(None)
        session.undo()
        return count

    model, optimizer = made()
    train(model, optimizer, range(1))
    gc.collect()
    lines_until(10**9, model, optimizer)  # what is made once is there
    num_lines = lines_until(10**9, model, optimizer)
    assert num_lines > 300
    before = _objects(model, optimizer)
    # At the end of it nothing but the way back to the caller is left: every line of that.
    for stop in (*range(1, num_lines - 20, 17), *range(num_lines - 20, num_lines + 1)):
        with contextlib.suppress(Interrupt):
            # There may be fewer: some lines are for each object that Python has at the time.
            assert lines_until(stop, model, optimizer) < stop
            assert stop > num_lines // 2
        assert _objects(model, optimizer) == before, f"interrupted before line {stop}"
    # Nor is anything locked for other threads.
    other = threading.Thread(target=lines_until, args=(10**9, model, optimizer), daemon=True)
    other.start()
    other.join(60)
    assert not other.is_alive()


@pytest.mark.parametrize("around", [None, "deepcopy", "pickle"])
def test_a_copy_in_the_middle_of_a_run_trains_by_itself(around: str | None) -> None:
    choices = [c for c in ALL if c.technique != "pure_bf16"]
    expected = train(*made(), range(6))[3:]
    model, optimizer = made()
    apply_choices(choices, model, [optimizer])
    train(model, optimizer, range(3))
    if around == "deepcopy":
        model, optimizer = copy.deepcopy((model, optimizer))
    elif around == "pickle":
        file = io.BytesIO()
        torch.save((model, optimizer), file)
        file.seek(0)
        model, optimizer = torch.load(file, weights_only=False)
    assert train(model, optimizer, range(3, 6)) == expected


def test_a_plan_is_put_on_a_copy_as_on_any_model() -> None:
    model, optimizer = made()
    tightfit.apply(plan_of(), model, optimizer)
    twin = copy.deepcopy(model)
    assert isinstance(twin.layers[0].forward, WrappedForward)
    own = torch.optim.AdamW(twin.parameters(), lr=1e-2, foreach=True)
    session = tightfit.apply(plan_of(), twin, own)
    assert train(twin, own) == train(*made())
    session.undo()
    assert all("forward" not in vars(module) for module in twin.modules())
    assert isinstance(model.layers[0].forward, WrappedForward)


def test_a_copy_of_a_model_that_was_refused_is_not() -> None:
    model, optimizer = made()
    apply_choices(CHOICES, model, [optimizer]).refuse("no")
    twin = copy.deepcopy(model)
    assert train(twin, torch.optim.AdamW(twin.parameters(), lr=1e-2, foreach=True)) == train(*made())


def test_an_object_that_keeps_its_session_is_copied_and_saved_without_the_plan() -> None:
    model, optimizer = made()
    model.session = session = apply_choices(CHOICES, model, [optimizer])
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (twin, torch.load(file, weights_only=False)):
        assert other.session.model is other and not other.session.is_on
        other.session.undo()
    assert session.is_on and isinstance(model.layers[0].forward, WrappedForward)


def test_models_and_optimizers_that_are_dropped_are_freed() -> None:
    model, optimizer = made()
    tightfit.apply(plan_of(ALL), model, optimizer)
    train(model, optimizer, range(1))
    left = [weakref.ref(each) for each in (model, optimizer, model.head.weight, model.layers[0])]
    del model, optimizer
    gc.collect()
    assert [each() for each in left] == [None] * 4


def test_a_model_is_called_with_arguments_of_any_name() -> None:
    class Named(nn.Module):
        def forward(self, forward: torch.Tensor, args: int = 0) -> torch.Tensor:
            return forward + args

    model = Named()
    session = Session(model=model, optimizers=[])
    session.guard()
    assert model(forward=torch.zeros(1), args=1) == 1
    session.undo()


def test_a_copy_is_given_the_batch_that_it_is_trained_with() -> None:
    model, optimizer = made()
    tightfit.apply(plan_of(), model, optimizer)
    twin = copy.deepcopy(model)
    rows = torch.cat([batch_of(0)[0]] * 3)
    assert twin(rows).shape[0] == len(rows)
    with pytest.warns(UserWarning, match="larger than"):
        model(rows)


def test_a_shallow_copy_of_a_module_runs_with_its_own_settings_and_without_the_plan() -> None:
    class Scaled(nn.Linear):
        scale = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * super().forward(x)

    layer = Scaled(3, 3)
    session = Session(model=layer, optimizers=[])
    session.wrap_forward(layer, doubling)
    other, batch = copy.copy(layer), torch.ones(1, 3)
    other.scale = 3.0
    third = copy.copy(other)
    torch.testing.assert_close(other(batch), 3 * nn.Linear.forward(layer, batch))
    torch.testing.assert_close(layer(batch), 2 * nn.Linear.forward(layer, batch))
    # Hooks are shared by shallow copies.
    third.register_forward_hook(lambda _, __, out: out + 1)
    torch.testing.assert_close(third(batch), 3 * nn.Linear.forward(layer, batch) + 1)
    torch.testing.assert_close(layer(batch), 2 * nn.Linear.forward(layer, batch) + 1)
    assert "forward" not in vars(other) and isinstance(vars(layer)["forward"], WrappedForward)
    session.undo()


def test_a_forward_that_is_set_on_another_module_by_name_runs_for_its_own() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    session = Session(model=first, optimizers=[])
    session.wrap_forward(first, doubling)
    second.forward = first.forward
    torch.testing.assert_close(second(torch.ones(1, 3)), 2 * nn.Linear.forward(first, torch.ones(1, 3)))
    session.undo()


def test_a_forward_that_outlives_its_module_says_so() -> None:
    layer = nn.Linear(3, 3)
    Session(model=nn.Sequential(), optimizers=[]).wrap_forward(layer, doubling)
    kept = layer.forward
    del layer
    with pytest.raises(ApplyError, match="after the module was freed"):
        kept(torch.ones(1, 3))


def test_a_copy_of_a_module_within_the_model_is_undone_with_it() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    session = apply_choices([choice("checkpointing", "Sequential.0")], model, [])
    model.append(copy.deepcopy(model[0]))
    assert isinstance(vars(model[1]).get("forward"), WrappedForward)
    session.undo()
    assert not any("forward" in vars(module) for module in model.modules())
