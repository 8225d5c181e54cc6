"""Eight leaks by reference cycles: what only Python's cyclic garbage collector frees, or not even that where autograd's C++ graph is a part of the cycle."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.leaks.script import leaking

CYCLE = "reference cycle"


class _KeepsItsOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()  # leaks here: output_on_the_context
        ctx.y = y
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@leaking(CYCLE, holder="y")
def output_on_the_context(device: str) -> Iterator[None]:
    """pytorch/pytorch#25340: an autograd.Function sets its output as an attribute of the context, which the output's graph holds."""
    x = torch.rand(256, 256, device=device, requires_grad=True)
    while True:
        _KeepsItsOutput.apply(x)
        yield


class _Switch(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(256, 256, device=device))  # leaks here: bound_method_of_itself
        self.chosen = self.twice

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x + self.table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.chosen(x)


@leaking(CYCLE, holder="table")
def bound_method_of_itself(device: str) -> Iterator[None]:
    """pytorch/pytorch#128211: a module keeps one of its own bound methods as an attribute, and is made anew for each sample."""
    while True:
        model = _Switch(device)
        model(torch.ones(256, 256, device=device))
        yield


class _Hooked(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256, device=device)  # leaks here: hook_that_closes_over_self
        self.seen = 0

        def count(_module: nn.Module, _args: Any, _output: Any) -> None:
            self.seen += 1

        self.layer.register_forward_hook(count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@leaking(CYCLE, holder="weight")
def hook_that_closes_over_self(device: str) -> Iterator[None]:
    """pytorch/pytorch#46386: a forward hook is a closure over the module that it is registered on; a model is built per fold."""
    while True:
        net = _Hooked(device)
        with torch.no_grad():
            net(torch.ones(8, 256, device=device))
        del net
        yield


@leaking(CYCLE, holder="grad")
def gradient_with_a_graph(device: str) -> Iterator[None]:
    """pytorch/pytorch#7343, #4661: backward(create_graph=True) makes a cycle of a leaf, its gradient and the gradient's graph, all of it in C++."""
    while True:
        x = torch.randn(256, 256, device=device).requires_grad_()  # leaks here
        y = x.tanh()  # leaks here
        y.backward(torch.ones_like(y), create_graph=True)  # leaks here
        del x, y
        yield


def _attempt(device: str) -> str:
    activations = torch.zeros(256, 256, device=device)  # leaks here: error_that_is_kept
    failed = None
    try:
        activations.view(-1, 7)
    except RuntimeError as error:
        failed = error
    return type(failed).__name__


@leaking(CYCLE, holder="activations")
def error_that_is_kept(device: str) -> Iterator[None]:
    """pytorch/pytorch#10348, #27600: an error is assigned to a local variable, and its traceback refers to the frame that has the variable."""
    while True:
        _attempt(device)
        yield


class _Metric:
    def __init__(self) -> None:
        self.preds: list[torch.Tensor] = []
        self.update = self._counted(self.update)  # type: ignore[method-assign]
        self.num_updates = 0

    def _counted(self, update: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(update)
        def counted(*args: Any) -> None:
            self.num_updates += 1
            update(*args)

        return counted

    def update(self, preds: torch.Tensor) -> None:
        self.preds.append(preds * 0.5)  # leaks here: metric_that_wraps_its_methods


@leaking(CYCLE, holder="preds")
def metric_that_wraps_its_methods(device: str) -> Iterator[None]:
    """Lightning-AI/torchmetrics#1949: a metric puts wrappers of its own methods on itself; a new one is made for each evaluation."""
    while True:
        metric = _Metric()
        metric.update(torch.ones(256, 256, device=device))
        yield


def _load(model: nn.Module, device: str) -> int:
    state = {}
    for name, value in model.state_dict().items():
        state[name] = torch.zeros_like(value, device=device)  # leaks here: recursive_inner_function

    def load(module: nn.Module, prefix: str = "") -> int:
        own = [name for name in state if name.startswith(prefix)]
        return len(own) + sum(load(child, f"{prefix}{name}.") for name, child in module.named_children())

    return load(model)


@leaking(CYCLE, holder="state")
def recursive_inner_function(device: str) -> Iterator[None]:
    """pytorch/pytorch#20199: an inner function that calls itself refers to its own closure, and with it to a state dict."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 1))
    while True:
        _load(model, device)
        yield


class _Solve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, function: Callable[[torch.Tensor], torch.Tensor], start: torch.Tensor, *params: torch.Tensor
    ) -> torch.Tensor:
        ctx.function = function
        return function(start)  # leaks here: solution_kept_by_its_problem

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, gradient, gradient


class _Problem:
    def __init__(self, scale: torch.Tensor) -> None:
        self.scale = scale
        self.solution = _Solve.apply(self.scaled, torch.ones_like(scale), scale)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x  # leaks here: solution_kept_by_its_problem


@leaking(CYCLE, holder="solution")
def solution_kept_by_its_problem(device: str) -> Iterator[None]:
    """pytorch/pytorch#52140: a bound method is kept by the context of a Function, whose output the object keeps."""
    scale = torch.ones(256, 256, device=device, requires_grad=True)
    while True:
        _Problem(scale)
        yield
