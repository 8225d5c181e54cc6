"""Training programs that do with gradients, states and steps what people really do, for the techniques that take those over.

Each is called with `Put`, which puts a technique on a model and its optimizers, or nothing; it returns what it has seen besides the weights.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Put = Callable[..., Any]
Seen = list[Any]
Program = Callable[[Put], tuple[nn.Module, Seen]]

NUM_STEPS = 6
PROGRAMS: dict[str, Program] = {}


def program(made: Program) -> Program:
    """Adds a program to the table."""
    PROGRAMS[made.__name__] = made
    return made


def model_of(width: int = 64) -> nn.Module:
    """Two layers, one of them large enough to have its states coded."""
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4))


def adam(parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    """Adam with a rate at which a few steps show."""
    return torch.optim.Adam(parameters, **({"lr": 1e-2} | settings))


def made(put: Put, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with an optimizer, and the technique on them."""
    model = model_of()
    optimizer = adam(model.parameters(), **settings)
    put(model, optimizer)
    return model, optimizer


def loss_of(model: nn.Module) -> torch.Tensor:
    """A loss on fresh data."""
    return model(torch.randn(5, 8)).square().mean()


@program
def plain(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    seen = []
    for _ in range(NUM_STEPS):
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return model, seen


@program
def zeroes_gradients(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model).backward()
        optimizer.step()
    return model, []


@program
def clips(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    seen = []
    for _ in range(NUM_STEPS):
        loss_of(model).backward()
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        optimizer.step()
        optimizer.zero_grad()
    return model, seen


@program
def clips_by_hand(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    seen = []
    for _ in range(NUM_STEPS):
        loss_of(model).backward()
        total = 0.0
        for p in model.parameters():
            if p.grad is not None:
                total += p.grad.data.norm(2).item() ** 2
        coefficient = 0.05 / (total**0.5 + 1e-6)
        if coefficient < 1:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.data.mul_(coefficient)
        seen.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return model, seen


@program
def clips_with_the_public_parts(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    seen = []
    for _ in range(NUM_STEPS):
        loss_of(model).backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, norm)
        seen.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    return model, seen


@program
def clips_by_value(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    for _ in range(NUM_STEPS):
        loss_of(model).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.001)
        optimizer.step()
        optimizer.zero_grad()
    return model, []


@program
def clips_by_the_largest(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    seen = []
    for _ in range(NUM_STEPS):
        loss_of(model).backward()
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=float("inf")).item())
        optimizer.step()
        optimizer.zero_grad()
    return model, seen


@program
def clips_each_layer(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    for _ in range(NUM_STEPS):
        loss_of(model).backward()
        for layer in model:
            nn.utils.clip_grad_norm_(layer.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return model, []


@program
def begins_to_clip_later(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    for step in range(NUM_STEPS):
        loss_of(model).backward()
        if step >= 4:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return model, []


@program
def adds_noise(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    for _ in range(NUM_STEPS):
        loss_of(model).backward()
        for p in model.parameters():
            # Drawn in float32: up to torch 2.11 the same seed gives other numbers in bfloat16.
            p.grad.add_(torch.randn(p.shape).to(p.dtype) * 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return model, []


@program
def replaces_gradients(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    for _ in range(NUM_STEPS):
        loss_of(model).backward()
        for p in model.parameters():
            p.grad = p.grad.sign()
        optimizer.step()
        optimizer.zero_grad()
    return model, []


@program
def drops_some_gradients(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    for _ in range(NUM_STEPS):
        loss_of(model).backward()
        model[0].weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return model, []


@program
def flat_buffer(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    parameters = list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters))
    offset = 0
    for p in parameters:
        p.grad = flat[offset : offset + p.numel()].view_as(p)
        offset += p.numel()
    seen = []
    for _ in range(NUM_STEPS):
        flat.zero_()
        loss_of(model).backward()
        flat.mul_(0.5)
        seen.append(flat.norm().item())
        optimizer.step()
    return model, seen


@program
def flat_buffer_zeroed_by_the_optimizer(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    parameters = list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters))
    offset = 0
    for p in parameters:
        p.grad = flat[offset : offset + p.numel()].view_as(p)
        offset += p.numel()
    seen = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model).backward()
        seen.append(flat.norm().item())
        optimizer.step()
    return model, seen


@program
def accumulates(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    for _ in range(NUM_STEPS):
        for _ in range(3):
            (loss_of(model) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, []


@program
def accumulates_later(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    for step in range(NUM_STEPS):
        for _ in range(1 if step < 4 else 2):
            loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, []


@program
def never_clears(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    for _ in range(NUM_STEPS):
        loss_of(model).backward()
        optimizer.step()
    return model, []


@program
def clears_by_hand(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    for step in range(NUM_STEPS):
        loss_of(model).backward()
        optimizer.step()
        if step % 3 == 0:
            model.zero_grad()
        elif step % 3 == 1:
            for p in model.parameters():
                p.grad = None
        else:
            model.zero_grad(set_to_none=False)
    return model, []


@program
def zeroes_through_an_alias(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    loss_of(model).backward()
    gradients = [p.grad for p in model.parameters()]
    optimizer.step()
    for _ in range(NUM_STEPS):
        for gradient in gradients:
            gradient.zero_()
        loss_of(model).backward()
        optimizer.step()
    return model, []


@program
def adds_a_penalty_to_zeroed_gradients(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad(set_to_none=False)
        for p in model.parameters():
            if p.grad is not None:
                p.grad.add_(p.detach(), alpha=0.1)
        loss_of(model).backward()
        optimizer.step()
    return model, []


@program
def trains_parts_by_turns_with_zeroed_gradients(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put, weight_decay=0.1)
    for step in range(NUM_STEPS):
        optimizer.zero_grad(set_to_none=False)
        hidden = model[:4](torch.randn(5, 8))
        (hidden if step % 2 else model[4](hidden)).square().mean().backward()
        optimizer.step()
    return model, []


@program
def skips_steps(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model).backward()
        if step not in (2, NUM_STEPS - 1):
            optimizer.step()
    return model, []


@program
def skips_the_last_step(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model).backward()
        if step < NUM_STEPS - 1:
            optimizer.step()
    return model, []


@program
def skips_what_is_not_finite(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        (loss_of(model) * (float("nan") if step == 4 else 1.0)).backward()
        if all(torch.isfinite(p.grad).all() for p in model.parameters()):
            optimizer.step()
    return model, []


@program
def skips_by_the_norm(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        (loss_of(model) * (float("inf") if step == 1 else 1.0)).backward()
        if torch.isfinite(nn.utils.clip_grad_norm_(model.parameters(), 1.0)):
            optimizer.step()
    return model, []


@program
def unfreezes_later(put: Put) -> tuple[nn.Module, Seen]:
    model = model_of()
    model[2].requires_grad_(False)
    optimizer = adam(model.parameters())
    put(model, optimizer)
    for step in range(NUM_STEPS):
        if step == 3:
            model[2].requires_grad_(True)
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, []


@program
def adds_a_group_later(put: Put) -> tuple[nn.Module, Seen]:
    model = model_of()
    optimizer = adam(model[4].parameters())
    put(model, optimizer)
    for step in range(NUM_STEPS):
        if step == 3:
            optimizer.add_param_group({"params": model[2].parameters(), "lr": 1e-3})
        model.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    return model, []


def _hooks(before: bool, after: bool) -> Program:
    def hooked(put: Put) -> tuple[nn.Module, Seen]:
        model = model_of()
        optimizer = adam(model.parameters())
        seen: Seen = []

        def look(o: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            seen.append(
                (len(o.param_groups), sum(len(g["params"]) for g in o.param_groups), model[2].weight.sum().item())
            )

        def halve(o: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            for group in o.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.mul_(0.5)
                        seen.append(p.grad.norm().item())

        def add() -> None:
            optimizer.register_step_pre_hook(halve)
            optimizer.register_step_post_hook(look)

        if before:
            add()
        put(model, optimizer)
        if after:
            add()
        for _ in range(NUM_STEPS):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, seen

    return hooked


PROGRAMS["step_hooks_before"] = _hooks(before=True, after=False)
PROGRAMS["step_hooks_after"] = _hooks(before=False, after=True)


@program
def step_hook_added_later(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    seen: Seen = []

    def halve(o: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        for p in model.parameters():
            p.grad.mul_(0.5)

    for step in range(NUM_STEPS):
        if step == 4:
            optimizer.register_step_pre_hook(halve)
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, seen


@program
def step_hook_raises(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    seen: Seen = []

    def fail(_o: Any, _args: Any, _kwargs: Any) -> None:
        if len(seen) in (1, 3):
            seen.append("raised")
            raise ValueError("a hook of the script's own")
        seen.append("passed")

    optimizer.register_step_pre_hook(fail)
    optimizer.register_step_post_hook(fail)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model).backward()
        try:
            optimizer.step()
        except ValueError:
            seen.append(len(optimizer.param_groups))
    return model, seen


@program
def interrupted_in_a_step_hook(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    calls: list[int] = []

    def interrupt(_o: Any, _args: Any, _kwargs: Any) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt

    optimizer.register_step_post_hook(interrupt)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model).backward()
        try:
            optimizer.step()
        except KeyboardInterrupt:
            continue
    return model, [len(optimizer.param_groups)]


@program
def forward_raises(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        try:
            loss_of(model).backward()
            if step == 3:
                model(torch.randn(5, 9))
            optimizer.step()
        except RuntimeError:
            continue
    return model, []


class _Fails(torch.autograd.Function):
    fails = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if _Fails.fails:
            raise RuntimeError("out of memory")
        return gradient


@program
def backward_raises(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        _Fails.fails = step == 4
        try:
            model[2:](_Fails.apply(model[:2](torch.randn(5, 8)))).square().mean().backward()
            optimizer.step()
        except RuntimeError:
            continue
        finally:
            _Fails.fails = False
    return model, []
