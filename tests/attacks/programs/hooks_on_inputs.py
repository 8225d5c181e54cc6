"""Blocks that put hooks on what they are given: a second run would put them there once more, and the backward pass goes on to those tensors after it."""

from collections.abc import Callable

import torch
from tests.attacks.models import Block, Net, sgd, tokens, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial


def _halved(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 0.5


def _blocks(hooks: Callable[[torch.Tensor], object]) -> list[Block]:
    class Hooking(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hooks(x)
            return x + self.inner(x)

    return [Hooking(), Hooking()]


@attack("recomputation", "a block halves the gradient of its input by a hook that it puts there")
def hook_on_own_input(t: Trial) -> None:
    train(t, Net(_blocks(lambda x: x.register_hook(_halved))))


@attack("recomputation", "a block halves the gradient of its input by a pre-hook on the node that has made it")
def prehook_on_node_of_input(t: Trial) -> None:
    def hooks(x: torch.Tensor) -> None:
        if x.grad_fn is not None:
            x.grad_fn.register_prehook(lambda gradients: tuple(g if g is None else _halved(g) for g in gradients))

    train(t, Net(_blocks(hooks)))


@attack("recomputation", "a block counts in a hook that waits for the gradients of several tensors")
def multi_gradient_hook_on_input(t: Trial) -> None:
    seen: list[int] = []

    def hooks(x: torch.Tensor) -> None:
        torch.autograd.graph.register_multi_grad_hook([x, x * 2], lambda _: seen.append(1), mode="any")

    train(t, Net(_blocks(hooks)), after=lambda _: t.note("seen", len(seen)))


@attack("recomputation", "a block puts a hook on a leaf that is no parameter, which all blocks are given")
def hook_on_shared_leaf(t: Trial) -> None:
    slope = torch.ones(8, requires_grad=True)

    def hooks(_: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            slope.register_hook(_halved)

    class Sloped(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks(self.stem(x) * slope)

    model = Sloped(_blocks(hooks))
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        slope.grad = None
        loss.backward()
        t.note("gradient", slope.grad)
        optimizer.step()
        t.end_step()


@attack("recomputation", "a block retains the gradient of its input, which is read after the backward pass")
def retained_gradient_of_own_input(t: Trial) -> None:
    kept: list[torch.Tensor] = []

    def hooks(x: torch.Tensor) -> None:
        x.retain_grad()
        kept.append(x)

    def read(_: int) -> None:
        t.note("gradients", [x.grad for x in kept])
        kept.clear()

    train(t, Net(_blocks(hooks)), between=read)
