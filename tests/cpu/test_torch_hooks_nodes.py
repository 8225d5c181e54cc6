"""Hooks on nodes of a graph are told to who waits for them, and torch is as it was when nobody does."""

import inspect
from typing import Any

import torch
from torch.autograd.function import _HookMixin

from tightfit.torch_hooks.node_hooks import on_node_hooks


class Owner:
    """Remembers the hooks that it was told of."""

    def __init__(self) -> None:
        self.hooks: list[Any] = []

    def before_node_hook(self, hook: Any) -> None:
        """Remembers one."""
        self.hooks.append(hook)


class Doubled(torch.autograd.Function):
    """A node of Python's own."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def test_hooks_on_nodes_of_every_kind_are_told_until_the_owner_leaves() -> None:
    before = inspect.getattr_static(_HookMixin, "_register_hook")
    x = torch.ones(2, requires_grad=True)
    owner = Owner()
    leave = on_node_hooks(owner)
    hooks = [lambda outputs: None, lambda outputs: None, lambda inputs, outputs: None]
    (2 * x).grad_fn.register_prehook(hooks[0])
    Doubled.apply(x).grad_fn.register_prehook(hooks[1])
    x.expand_as(x).grad_fn.next_functions[0][0].register_hook(hooks[2])
    assert owner.hooks == hooks
    leave()
    (2 * x).grad_fn.register_prehook(hooks[0])
    assert owner.hooks == hooks
    assert inspect.getattr_static(_HookMixin, "_register_hook") is before


def test_a_hook_works_while_somebody_waits_for_it() -> None:
    x = torch.ones(2, requires_grad=True)
    owner = Owner()
    leave = on_node_hooks(owner)
    made = 3 * x
    handle = made.grad_fn.register_prehook(lambda outputs: tuple(10 * g for g in outputs))
    made.sum().backward(retain_graph=True)
    assert x.grad.tolist() == [30, 30]
    handle.remove()
    made.sum().backward()
    assert x.grad.tolist() == [33, 33]
    leave()


def test_the_hooks_of_torch_for_modules_are_not_told() -> None:
    owner = Owner()
    leave = on_node_hooks(owner)
    module = torch.nn.Linear(2, 2)
    module.register_full_backward_hook(lambda module, inputs, outputs: None)
    module(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert not owner.hooks
    leave()
