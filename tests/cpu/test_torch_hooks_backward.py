"""Backward passes are told to those whose parameters they reach, and to nobody else; torch is as it was once nobody wants to be told."""

import gc
import threading
from collections.abc import Callable, Container, Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tightfit.torch_hooks.backward import BackwardPass, of_a_part, on_backward

PLAIN = torch.autograd._engine_run_backward


class Owner:
    """Notes the passes that it is told of."""

    def __init__(self, parameters: Container[torch.Tensor] | None) -> None:
        self.parameters = parameters
        self.passes: list[BackwardPass] = []
        self.open = 0

    def concerned_parameters(self) -> Container[torch.Tensor] | None:
        return self.parameters

    def around_backward(self, backward: BackwardPass) -> Any:
        self.passes.append(backward)
        self.open += 1
        try:
            return backward.run()
        finally:
            self.open -= 1


def _layer() -> torch.nn.Linear:
    return torch.nn.Linear(2, 2)


def _of(*modules: torch.nn.Module) -> Owner:
    return Owner({p for module in modules for p in module.parameters()})


def _loss(*modules: torch.nn.Module) -> torch.Tensor:
    value = torch.ones(1, 2)
    for module in modules:
        value = module(value)
    return value.sum()


@pytest.fixture(autouse=True)
def torch_is_as_it_was() -> Iterator[None]:
    yield
    gc.collect()
    assert torch.autograd._engine_run_backward is PLAIN


def test_only_those_are_told_whose_parameters_get_gradients() -> None:
    first, second, third = _layer(), _layer(), _layer()
    owners = [_of(first), _of(second), Owner(None)]
    leave = [on_backward(owner) for owner in owners]

    def told(run: Callable[[], Any]) -> list[int]:
        before = [len(owner.passes) for owner in owners]
        run()
        return [len(owner.passes) - count for owner, count in zip(owners, before, strict=True)]

    assert told(_loss(first).backward) == [1, 0, 1]
    assert told(_loss(third, second, first).backward) == [1, 1, 1]
    assert told(_loss(third).backward) == [0, 0, 1]
    assert told(_loss(first.requires_grad_(False), third).backward) == [0, 0, 1]
    first.requires_grad_(True)
    assert told(lambda: _loss(first, second).backward(inputs=[first.weight])) == [1, 0, 1]
    assert told(second.weight.sum().backward) == [0, 1, 1]
    assert told(lambda: second.bias.backward(torch.ones(2))) == [0, 1, 1]
    assert told(lambda: torch.autograd.grad(_loss(first, second), [first.bias])) == [1, 0, 1]
    assert [owner.passes[-1].accumulates for owner in owners] == [False, True, False]
    edge = torch.autograd.graph.get_gradient_edge
    assert told(lambda: torch.autograd.backward((edge(_loss(second)),))) == [0, 1, 1]
    assert told(lambda: _loss(first, second).backward(inputs=[edge(second.weight)])) == [0, 1, 1]
    for each in leave:
        each()
    assert told(_loss(first).backward) == [0, 0, 0]


def test_a_pass_that_concerns_nobody_runs_with_its_own_arguments_and_frees_its_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, other = _layer(), _layer()
    seen: list[tuple[Any, Any]] = []

    def spied(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return PLAIN(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "_engine_run_backward", spied)
        loss = _loss(other)
        loss.backward(retain_graph=True)
        owner = _of(own)
        leave = on_backward(owner)
        loss.backward(retain_graph=True)
        for before, after in zip(seen[0][0], seen[1][0], strict=True):
            assert before is after or before == after or torch.equal(before[0], after[0])
        assert seen[0][1] == seen[1][1]
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        leave()
        assert not owner.passes


def test_observers_are_around_owners_whoever_came_first() -> None:
    order: list[bool] = []

    class Ordered(Owner):
        def around_backward(self, backward: BackwardPass) -> Any:
            order.append(self.parameters is None)
            return super().around_backward(backward)

    for observer_first in (True, False):
        layer = _layer()
        owners = [Ordered(None), Ordered(set(layer.parameters()))]
        leave = [on_backward(owner) for owner in (owners if observer_first else owners[::-1])]
        _loss(layer).backward()
        assert order == [True, False]
        order.clear()
        for each in leave:
            each()


def test_a_pass_within_a_pass_says_so() -> None:
    layer = _layer()
    owner = _of(layer)
    leave = on_backward(owner)
    start = torch.ones(1, 2, requires_grad=True)
    checkpoint(layer, start, use_reentrant=True).sum().backward()
    leave()
    assert [each.is_nested for each in owner.passes] == [True]


def test_an_owner_runs_its_pass_again_with_the_others_around_it() -> None:
    layer, held = _layer(), []
    expected = torch.autograd.grad(_loss(layer), [layer.weight])[0]

    class Twice(Owner):
        def around_backward(self, backward: BackwardPass) -> Any:
            held.append(backward)
            result = backward.run(keeps_graph=True)
            layer.weight.grad = None
            return result

    owner, observer = Twice(set(layer.parameters())), Owner(None)
    leave = [on_backward(owner), on_backward(observer)]
    loss = _loss(layer)
    loss.backward()
    held[0].run_again()
    assert torch.equal(layer.weight.grad, expected)
    assert len(held) == 1 and len(observer.passes) == 2
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    for each in leave:
        each()


def test_an_exception_in_a_pass_reaches_the_program_and_the_next_pass_is_told() -> None:
    layer = _layer()
    owner = _of(layer)
    leave = on_backward(owner)
    handle = layer.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        _loss(layer).backward()
    handle.remove()
    _loss(layer).backward()
    leave()
    assert len(owner.passes) == 2 and not owner.open


def test_a_class_that_calls_something_variable_is_no_leaf() -> None:
    own, other = _layer(), _layer()

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            ctx.variable = own.weight
            return value * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2

    owner = _of(own)
    leave = on_backward(owner)
    Function.apply(_loss(other)).backward()
    leave()
    assert not owner.passes


def test_a_pass_beside_one_of_a_part_in_another_thread_is_none() -> None:
    layer = _layer()
    owner = _of(layer)
    leave = on_backward(owner)
    with of_a_part():
        _loss(layer).backward()
        other = threading.Thread(target=_loss(layer).backward)
        other.start()
        other.join()
    leave()
    assert [each.is_of_part for each in owner.passes] == [True, False]
