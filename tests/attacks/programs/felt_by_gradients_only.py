"""Numbers and choices of a forward that only its backward pass feels: scales kept on a function's context, hooks, gradients stopped by turns."""

import functools
import itertools
import math
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from tests.attacks.models import Block, Net, adamw, sgd, tokens, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch.nn import functional


class _Scaled(torch.autograd.Function):
    """The identity, whose gradient is scaled by a number of the forward's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.scale, None


class _Reversing(Block):
    """A block whose gradient is scaled by what a function of the script's says in the forward."""

    def __init__(self, scale: Callable[[], float]) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + _Scaled.apply(self.inner(x), self.scale())


def _ramp() -> Iterator[float]:
    for number in itertools.count():
        yield 2 / (1 + math.exp(-0.5 * number))


@attack("recomputation", "gradients of blocks are scaled by a schedule that a generator gives in the forward (a ramp)")
def scale_by_a_generator(t: Trial) -> None:
    train(t, Net([_Reversing(functools.partial(next, _ramp())) for _ in range(2)]))


@attack("recomputation", "gradients of blocks are scaled by the next item of a list's iterator")
def scale_by_a_list_iterator(t: Trial) -> None:
    class Listed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scales = iter([0.1 * n for n in range(1, 40)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + _Scaled.apply(self.inner(x), next(self.scales))

    train(t, Net([Listed(), Listed()]))


@attack(
    "recomputation", "gradients of blocks are scaled by a draw of a numpy generator in the forward (gradient noise)"
)
def scale_by_a_numpy_generator(t: Trial) -> None:
    chance = np.random.default_rng(0)
    train(t, Net([_Reversing(lambda: float(chance.uniform(0.5, 1.5))) for _ in range(2)]))


def _counted() -> float:
    _counted.calls = getattr(_counted, "calls", 0) + 1
    return 2 / (1 + math.exp(-0.3 * _counted.calls))


@attack(
    "recomputation", "gradients of blocks are scaled by a function that counts its calls in an attribute of its own"
)
def scale_by_a_counting_function(t: Trial) -> None:
    _counted.calls = 0
    train(t, Net([_Reversing(_counted), _Reversing(_counted)]))


_PROGRESS = types.ModuleType("progress_of_attacks")


def _of_progress() -> float:
    _PROGRESS.step += 1
    return 2 / (1 + math.exp(-0.2 * _PROGRESS.step)) - 1


@attack(
    "recomputation", "a gradient is reversed by a strength that grows with a count in a module of the script's (DANN)"
)
def scale_by_a_count_in_a_module(t: Trial) -> None:
    _PROGRESS.step = 0
    train(t, Net([_Reversing(_of_progress), _Reversing(_of_progress)]))


@attack("recomputation", "the same, where the loop counts on between the forward and the backward pass")
def progress_between_forward_and_backward(t: Trial) -> None:
    _PROGRESS.step = 0

    def strength() -> float:
        return 2 / (1 + math.exp(-0.2 * _PROGRESS.step)) - 1

    model = Net([_Reversing(strength), _Reversing(strength)])
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(5):
        loss = model(*tokens(step))
        _PROGRESS.step += 1
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "recomputation", "a hook on an inner tensor scales its gradient by a number that an iterator gave in the forward"
)
def hook_scales_by_an_iterator(t: Trial) -> None:
    class Hooked(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scales = itertools.count(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out, scale = self.inner(x), 1 + 0.2 * (next(self.scales) % 3)
            if out.requires_grad:
                out.register_hook(lambda gradient: gradient * scale)
            return x + out

    train(t, Net([Hooked(), Hooked()]))


@attack("recomputation", "every third call stops the gradient of the branch, as a cycle of itertools says")
def gradient_stopped_by_turns(t: Trial) -> None:
    class Stopping(Block):
        def __init__(self) -> None:
            super().__init__()
            self.turns = itertools.cycle([True, False, True])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.inner(x)
            return x + (out if next(self.turns) else out.detach())

    train(t, Net([Stopping(), Stopping()]), num_steps=5)


@attack("recomputation", "gradients are off in every third call, as a count in a module of the script's says")
def gradients_off_by_turns(t: Trial) -> None:
    _PROGRESS.step = 0

    class Off(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            _PROGRESS.step += 1
            with torch.set_grad_enabled(torch.is_grad_enabled() and _PROGRESS.step % 3 != 0):
                out = self.inner(x)
            return x + out

    train(t, Net([Off(), Off()]), num_steps=5)


@attack("recomputation", "a weight is detached in every third call, as a count in a module of the script's says")
def weight_detached_by_turns(t: Trial) -> None:
    _PROGRESS.step = 0

    class Partly(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            _PROGRESS.step += 1
            weight = self.wide.weight if _PROGRESS.step % 3 else self.wide.weight.detach()
            return x + self.narrow(functional.gelu(functional.linear(self.norm(x), weight, self.wide.bias)))

    train(t, Net([Partly(), Partly()]), num_steps=5)


@attack(
    "recomputation", "a counting function decides in which calls the input is detached (random truncation of depth)"
)
def input_detached_by_turns(t: Trial) -> None:
    _counted.calls = 0

    class Truncated(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            _counted()
            return x + self.inner(x.detach() if _counted.calls % 4 == 0 else x)

    train(t, Net([Truncated(), Truncated()]), num_steps=5)


@attack(
    "recomputation",
    "the loop switches which branch has gradients between forward and backward pass (a flag in its module)",
)
def branch_chosen_between(t: Trial) -> None:
    _PROGRESS.step = 0

    class Chosen(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.inner(x)
            return x + (out.detach() * 0.5 + out * 0.5 if _PROGRESS.step % 2 else out * 0.5 + out.detach() * 0.5)

    model = Net([Chosen(), Chosen()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(5):
        loss = model(*tokens(step))
        _PROGRESS.step += 1
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()
