"""Graphs that the program retains and runs once more by itself before its step, and gradients that it keeps from one backward pass to the next."""

from collections.abc import Callable

import torch
from tests.attacks.models import Net, sgd, tokens
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn

After = Callable[[int, nn.Module, torch.Tensor, torch.Tensor], None]


def _retaining(t: Trial, after: After, *, from_step: int = 0, every: int = 1) -> None:
    """Runs each step's graph backwards and retains it; `after` is called with the step, the model, its input and the loss before the optimizer steps."""
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(6):
        x, y = tokens(step)
        x.requires_grad_()
        loss = model(x, y)
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        if step >= from_step and (step - from_step) % every == 0:
            after(step, model, x, loss)
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


def _curvature(t: Trial) -> After:
    def after(_: int, model: nn.Module, __: torch.Tensor, loss: torch.Tensor) -> None:
        weights = list(model.parameters())
        gradients = torch.autograd.grad(loss, weights, create_graph=True)
        products = torch.autograd.grad(sum((g * g.detach()).sum() for g in gradients), weights)
        t.note("curvature", [product.sum() for product in products])

    return after


@attack("second order", "a Hessian-vector product on the retained graph of the step, before the optimizer's")
def curvature_after_backward(t: Trial) -> None:
    _retaining(t, _curvature(t))


@attack("second order", "a Hessian-vector product on the retained graph, from the fourth step on, in every second one")
def curvature_later(t: Trial) -> None:
    _retaining(t, _curvature(t), from_step=3, every=2)


@attack("gradients", "the gradient of the input is taken from the retained graph before the step (a saliency map)")
def saliency_after_backward(t: Trial) -> None:
    _retaining(t, lambda _, __, x, loss: t.note("saliency", torch.autograd.grad(loss, x)[0]), from_step=3)


@attack("gradients", "the retained graph is run backwards once more to the input alone (inputs=...), and to one weight")
def inputs_after_backward(t: Trial) -> None:
    def after(step: int, model: nn.Module, x: torch.Tensor, loss: torch.Tensor) -> None:
        x.grad = None
        loss.backward(inputs=[x] if step % 2 else [model.head.weight])
        t.note("gradient", x.grad if x.grad is not None else 0.0)

    _retaining(t, after, from_step=1)


@attack("gradients", "gradients of two losses are kept by name, projected onto each other and put together (PCGrad)")
def projected_gradients(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(5):
        kept = []
        for part in range(2):
            optimizer.zero_grad()
            loss = model(*tokens(2 * step + part))
            loss.backward()
            kept.append([p.grad for p in model.parameters()])
            t.note("loss", loss)
        dot = sum((one * other).sum() for one, other in zip(*kept, strict=True))
        for p, one, other in zip(model.parameters(), *kept, strict=True):
            p.grad = one + other if dot >= 0 else one + 0.5 * other
        optimizer.step()
        t.end_step()


@attack("gradients", "each step's gradients are compared with those of the step before, which the program has kept")
def gradients_of_the_step_before(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    before: list[torch.Tensor] = []
    for step in range(5):
        optimizer.zero_grad()
        loss = model(*tokens(step))
        loss.backward()
        now = [p.grad for p in model.parameters() if p.grad is not None]
        t.note(
            "cosine",
            [nn.functional.cosine_similarity(a.flatten(), b.flatten(), 0) for a, b in zip(before, now, strict=False)],
        )
        before = now
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients", "gradients are taken off by name and set to None, and used for the step after another backward pass"
)
def gradients_taken_off(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(5):
        model(*tokens(step)).backward()
        taken = {name: p.grad for name, p in model.named_parameters()}
        for p in model.parameters():
            p.grad = None
        loss = model(*tokens(20 + step))
        loss.backward()
        for name, p in model.named_parameters():
            p.grad = 0.5 * (taken[name] + p.grad)
        optimizer.step()
        optimizer.zero_grad()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "gradients are taken off by name, cleared, and only their norms are read after the step")
def gradients_read_after_step(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(5):
        loss = model(*tokens(step))
        loss.backward()
        taken = [p.grad for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        t.note("norms", [g.norm() for g in taken if g is not None])
        t.note("loss", loss)
        t.end_step()
