"""Gradients of gradients: penalties, inner steps, products with the Hessian."""

from typing import Any

import torch
from tests.attacks.models import WIDTH, Block, Images, Net, images, sgd, tokens
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.func import functional_call, grad, jvp, vmap


class Critic(nn.Module):
    """Blocks and one number per example."""

    def __init__(self, blocks: Any = None) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(blocks or [Smooth(), Smooth()]))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One number per example."""
        return self.head(self.blocks(x)).mean((1, 2))


class Smooth(Block):
    """A block with second derivatives everywhere, and no parameter that is not used."""

    def __init__(self) -> None:
        super().__init__()
        del self.norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens."""
        return x + self.narrow(torch.tanh(self.wide(x)))


def _penalised(t: Trial, model: nn.Module, loss_of: Any, *, num_steps: int = 3, lr: float = 0.05) -> None:
    optimizer = sgd(model, lr=lr)
    t.apply(model, optimizer)
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = loss_of(step)
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("second order", "WGAN-GP: the norm of the gradient with respect to an interpolated input")
def gradient_penalty(t: Trial) -> None:
    model = Critic()

    def loss_of(step: int) -> torch.Tensor:
        x, other = tokens(step)[0], tokens(step + 50)[0]
        between = (0.3 * x + 0.7 * other).requires_grad_()
        (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        return model(x).mean() - model(other).mean() + 10 * (slope.flatten(1).norm(dim=1) - 1).square().mean()

    _penalised(t, model, loss_of)


@attack("second order", "R1: the squared gradient with respect to real inputs, every second step (lazy)")
def lazy_r1(t: Trial) -> None:
    model = Critic()

    def loss_of(step: int) -> torch.Tensor:
        x = tokens(step)[0].requires_grad_()
        score = model(x)
        loss = torch.nn.functional.softplus(-score).mean()
        if step % 2:
            (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
            loss = loss + 5 * slope.square().flatten(1).sum(1).mean()
        return loss

    _penalised(t, model, loss_of, num_steps=4)


@attack("second order", "double backpropagation through the loss: the gradient's norm with respect to the input")
def double_backpropagation(t: Trial) -> None:
    model = Net([Smooth(), Smooth()])

    def loss_of(step: int) -> torch.Tensor:
        x, y = tokens(step)
        x.requires_grad_()
        loss = model(x, y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + 20 * slope.square().sum()

    _penalised(t, model, loss_of)


@attack("second order", "a penalty on the gradient with respect to the weights (a flat minimum)")
def weight_gradient_penalty(t: Trial) -> None:
    model = Net([Smooth(), Smooth()])

    def loss_of(step: int) -> torch.Tensor:
        loss = model(*tokens(step))
        slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return loss + 0.1 * sum(slope.square().sum() for slope in slopes)

    _penalised(t, model, loss_of)


@attack("second order", "backward(create_graph=True), and a second backward pass on the gradients' norm")
def backward_with_create_graph(t: Trial) -> None:
    model = Net([Smooth(), Smooth()])
    optimizer = sgd(model, lr=0.05)
    t.apply(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(*tokens(step))
        loss.backward(create_graph=True)
        norm = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
        t.note("loss", loss)
        t.note("norm", norm)
        if isinstance(norm, torch.Tensor):
            (0.1 * norm).backward()
        optimizer.step()
        optimizer.zero_grad()
        t.end_step()


@attack("second order", "MAML: an inner step with create_graph, the outer loss through functional_call")
def maml(t: Trial) -> None:
    model = Net([Smooth(), Smooth()])

    def loss_of(step: int) -> torch.Tensor:
        names, weights = zip(*model.named_parameters(), strict=True)
        inner = model(*tokens(step))
        slopes = torch.autograd.grad(inner, weights, create_graph=True)
        fast = {name: w - 0.4 * slope for name, w, slope in zip(names, weights, slopes, strict=True)}
        return functional_call(model, fast, tokens(step + 50))

    _penalised(t, model, loss_of)


@attack("second order", "first-order MAML: the inner step without create_graph")
def first_order_maml(t: Trial) -> None:
    model = Net([Smooth(), Smooth()])

    def loss_of(step: int) -> torch.Tensor:
        names, weights = zip(*model.named_parameters(), strict=True)
        slopes = torch.autograd.grad(model(*tokens(step)), weights)
        fast = {name: w - 0.4 * slope for name, w, slope in zip(names, weights, slopes, strict=True)}
        return functional_call(model, fast, tokens(step + 50))

    _penalised(t, model, loss_of)


@attack("second order", "a product with the Hessian by two calls of autograd.grad")
def hessian_vector_product(t: Trial) -> None:
    model = Net([Smooth(), Smooth()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    weights = list(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        loss = model(*tokens(step))
        slopes = torch.autograd.grad(loss, weights, create_graph=True)
        direction = [torch.ones_like(w) for w in weights]
        along = sum((slope * d).sum() for slope, d in zip(slopes, direction, strict=True))
        product = torch.autograd.grad(along, weights)
        t.note("product", [p.norm() for p in product])
        for weight, slope, curve in zip(weights, slopes, product, strict=True):
            weight.grad = slope.detach() + 0.01 * curve
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("second order", "the gradient with respect to the input alone, for an adversarial example (FGSM)")
def adversarial_example(t: Trial) -> None:
    model = Net([Smooth(), Smooth()])

    def loss_of(step: int) -> torch.Tensor:
        x, y = tokens(step)
        x.requires_grad_()
        (slope,) = torch.autograd.grad(model(x, y), x)
        t.note("slope", slope)
        return model(x.detach() + 0.1 * slope.sign(), y)

    _penalised(t, model, loss_of)


@attack("second order", "forces: minus the gradient of an energy with respect to positions, in the loss")
def forces(t: Trial) -> None:
    model = Critic()

    def loss_of(step: int) -> torch.Tensor:
        x = tokens(step)[0].requires_grad_()
        energy = model(x)
        (force,) = torch.autograd.grad(-energy.sum(), x, create_graph=True)
        return (energy - 1).square().mean() + 10 * (force - 0.1).square().mean()

    _penalised(t, model, loss_of)


@attack("second order", "the gradient is taken inside of a block's forward, with create_graph (an energy block)")
def gradient_inside_block(t: Trial) -> None:
    class Energy(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                given = x if x.requires_grad else x.detach().requires_grad_()
                (slope,) = torch.autograd.grad(torch.tanh(self.wide(given)).sum(), given, create_graph=True)
            return x + self.narrow(torch.tanh(self.wide(x))) - 0.1 * slope

    model = Net([Energy(), Energy()])
    _penalised(t, model, lambda step: model(*tokens(step)))


@attack("second order", "a penalty on the slope through a chain of convolutions")
def image_gradient_penalty(t: Trial) -> None:
    model = Images([nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 3, padding=1), nn.Tanh()])

    def loss_of(step: int) -> torch.Tensor:
        x, y = images(step)
        x.requires_grad_()
        loss = model(x, y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + 100 * slope.square().sum()

    _penalised(t, model, loss_of)


@attack("second order", "a penalty on the slope that begins only at the third step")
def penalty_begins_later(t: Trial) -> None:
    model = Net([Smooth(), Smooth()])

    def loss_of(step: int) -> torch.Tensor:
        x, y = tokens(step)
        x.requires_grad_(step >= 2)
        loss = model(x, y)
        if step >= 2:
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + 20 * slope.square().sum()
        return loss

    _penalised(t, model, loss_of, num_steps=5)


@attack("second order", "gradients per example with torch.func (vmap over grad)")
def per_example_gradients(t: Trial) -> None:
    model = Net([Smooth(), Smooth()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        weights = {name: p.detach() for name, p in model.named_parameters()}

        def loss_of(given: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return functional_call(model, given, (x[None], y[None]))

        slopes = vmap(grad(loss_of), in_dims=(None, 0, 0))(weights, *tokens(step))
        for name, parameter in model.named_parameters():
            parameter.grad = slopes[name].clamp(-0.05, 0.05).mean(0)
        optimizer.step()
        t.end_step()


@attack("second order", "a forward-mode derivative (jvp) of the model in the loss")
def forward_mode(t: Trial) -> None:
    model = Critic()

    def loss_of(step: int) -> torch.Tensor:
        x = tokens(step)[0]
        score, slope = jvp(model, (x,), (torch.ones_like(x),))
        return score.mean() + slope.square().mean()

    _penalised(t, model, loss_of)


@attack("second order", "a Jacobian penalty by a random projection, with the graph kept (retain_graph)")
def jacobian_penalty(t: Trial) -> None:
    model = Net([Smooth(), Smooth()])

    def loss_of(step: int) -> torch.Tensor:
        x, y = tokens(step)
        x.requires_grad_()
        logits = model(x)
        direction = torch.randn(
            logits.shape, generator=torch.Generator(torch.get_default_device()).manual_seed(step)
        ).to(logits.dtype)
        (slope,) = torch.autograd.grad(logits, x, direction, create_graph=True)
        return model.loss(logits, y) + 0.1 * slope.square().mean()

    _penalised(t, model, loss_of)


@attack("second order", "path length regularisation (StyleGAN2), with a running mean on the module")
def path_length(t: Trial) -> None:
    model = Critic()
    model.register_buffer("mean_length", torch.zeros(()))

    def loss_of(step: int) -> torch.Tensor:
        x = tokens(step)[0].requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        length = slope.square().sum((1, 2)).sqrt()
        model.mean_length.lerp_(length.detach().mean(), 0.1)
        return (length - model.mean_length).square().mean() + model(x).mean()

    _penalised(t, model, loss_of)


class Smoothed(Smooth):
    """Before it, an attention by hand, whose backward pass has a derivative."""

    is_attention = True

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens."""
        q, k, v = self.qkv(x).chunk(3, -1)
        return super().forward(x + (0.3 * q @ k.transpose(-1, -2)).softmax(-1) @ v)


@attack("second order", "a penalty of the gradient that begins in the third step, of a net with attention")
def penalty_later_with_attention(t: Trial) -> None:
    model = Net([Smoothed(), Smoothed()])

    def loss_of(step: int) -> torch.Tensor:
        x, y = tokens(step)
        if step < 2:
            return model(x, y)
        loss = model(x.requires_grad_(), y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()

    _penalised(t, model, loss_of, num_steps=4)


@attack("second order", "a penalty on the gradient of the images begins at step 2, behind a chain with a stride")
def penalty_through_chain_later(t: Trial) -> None:
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 3, padding=1, stride=2), nn.Softplus()]
    model = Images([*layers, nn.Conv2d(4, 4, 3, padding=1)])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = images(step)
        loss = model(x.requires_grad_(step >= 2), y)
        if step >= 2:
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + 100 * gradient.square().sum((1, 2, 3)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()
