"""Loops whose own code reads or writes gradients, or acts between the backward pass and the step."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from tests.attacks.models import Net, adamw, sgd, tokens, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn.utils import (
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
    parameters_to_vector,
    vector_to_parameters,
)


def _between(t: Trial, act: Callable[[nn.Module, torch.optim.Optimizer, int], Any], *, lr: float = 0.3) -> None:
    """The plain loop with `act` between backward pass and step; losses are scaled up so that a missing clipping shows."""
    model = Net()
    optimizer = sgd(model, lr=lr)
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(*tokens(step))
        (10 * loss).backward()
        act(model, optimizer, step)
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "clipping by clip_grad_norm_")
def clip_by_norm(t: Trial) -> None:
    _between(t, lambda model, _, __: t.note("norm", clip_grad_norm_(model.parameters(), 0.5)))


@attack("gradients", "clipping by clip_grad_value_")
def clip_by_value(t: Trial) -> None:
    _between(t, lambda model, _, __: clip_grad_value_(model.parameters(), 0.01))


@attack("gradients", "clipping by the maximum norm (norm_type=inf)")
def clip_by_maximum(t: Trial) -> None:
    _between(t, lambda model, _, __: clip_grad_norm_(model.parameters(), 0.05, norm_type=float("inf")))


@attack("gradients", "clipping written by hand (if p.grad is not None)")
def clip_by_hand(t: Trial) -> None:
    def clip(model: nn.Module, _: Any, __: int) -> None:
        norm = sum(p.grad.norm() ** 2 for p in model.parameters() if p.grad is not None) ** 0.5
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(min(1.0, 0.5 / (float(norm) + 1e-6)))

    _between(t, clip)


@attack("gradients", "clipping by the public get_total_norm and clip_grads_with_norm_")
def clip_in_two_calls(t: Trial) -> None:
    def clip(model: nn.Module, _: Any, __: int) -> None:
        norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        clip_grads_with_norm_(model.parameters(), 0.5, norm)

    _between(t, clip)


@attack("gradients", "clipping of every parameter by its own norm")
def clip_each_parameter(t: Trial) -> None:
    def clip(model: nn.Module, _: Any, __: int) -> None:
        for parameter in model.parameters():
            clip_grad_norm_(parameter, 0.1)

    _between(t, clip)


@attack("gradients", "clipping of the head alone")
def clip_some(t: Trial) -> None:
    _between(t, lambda model, _, __: clip_grad_norm_(model.head.parameters(), 0.1), lr=0.02)


@attack("gradients", "clipping twice, by norm and then by value")
def clip_twice(t: Trial) -> None:
    def clip(model: nn.Module, _: Any, __: int) -> None:
        clip_grad_norm_(model.parameters(), 0.5)
        clip_grad_value_(model.parameters(), 0.02)

    _between(t, clip)


@attack("gradients", "clipping only from the third step on")
def clip_later(t: Trial) -> None:
    def clip(model: nn.Module, _: Any, step: int) -> None:
        if step >= 2:
            clip_grad_norm_(model.parameters(), 0.05)

    _between(t, clip, lr=0.02)


@attack("gradients", "adaptive clipping (timm's AGC): gradients against weights")
def adaptive_clipping(t: Trial) -> None:
    def clip(model: nn.Module, _: Any, __: int) -> None:
        for parameter in model.parameters():
            if parameter.grad is None:
                continue
            most = parameter.detach().norm().clamp(min=1e-3) * 0.01
            parameter.grad.detach().mul_((most / parameter.grad.norm().clamp(min=1e-6)).clamp(max=1.0))

    _between(t, clip)


@attack("gradients", "the gradient's norm is computed for the log alone")
def norm_logged(t: Trial) -> None:
    _between(
        t,
        lambda model, _, __: t.note("norm", sum(p.grad.norm() for p in model.parameters() if p.grad is not None)),
        lr=0.02,
    )


@attack("gradients", "noise is added to gradients (differential privacy)")
def gradient_noise(t: Trial) -> None:
    def add(model: nn.Module, _: Any, step: int) -> None:
        chance = torch.Generator(torch.get_default_device()).manual_seed(step)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(0.3 * torch.randn(parameter.shape, generator=chance).to(parameter.grad.dtype))

    _between(t, add, lr=0.02)


@attack("gradients", "gradients are replaced by their sign (p.grad = ...)")
def gradient_replaced(t: Trial) -> None:
    def replace(model: nn.Module, _: Any, __: int) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.sign() * 0.01

    _between(t, replace)


@attack("gradients", "gradients are centred per matrix (gradient centralisation)")
def gradient_centred(t: Trial) -> None:
    def centre(model: nn.Module, _: Any, __: int) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None and parameter.dim() > 1:
                parameter.grad.sub_(parameter.grad.mean(1, keepdim=True))

    _between(t, centre, lr=0.02)


@attack("gradients", "gradients that are not finite skip the step (if isfinite)")
def skipped_where_not_finite(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(*tokens(step)) * (float("inf") if step == 1 else 1.0)
        loss.backward()
        if all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in model.parameters()):
            optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "the step is skipped where the loss is high")
def skipped_by_loss(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(*tokens(step))
        loss.backward()
        if step % 2 == 0:
            optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "the last step of training is skipped (a backward pass for the log alone)")
def last_step_skipped(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(*tokens(step))
        loss.backward()
        if step < 3:
            optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "gradients are accumulated over two backward passes")
def accumulation(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(6):
        (model(*tokens(step)) / 2).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        t.end_step()


@attack("gradients", "accumulation begins after three plain steps (a growing batch)")
def accumulation_later(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(7):
        (model(*tokens(step)) / 2).backward()
        if step < 3 or step % 2:
            optimizer.step()
            optimizer.zero_grad()
        t.end_step()


@attack("gradients", "zero_grad is never called")
def never_zeroed(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model, lr=0.01)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "zero_grad every second step only (a moving sum)")
def zeroed_seldom(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model, lr=0.05)
    t.apply(model, optimizer)
    for step in range(5):
        if step % 2 == 0:
            optimizer.zero_grad()
        loss = model(*tokens(step))
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "gradients are zeroed in place by hand, through .data")
def zeroed_by_hand(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.data.zero_()
        loss = model(*tokens(step))
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "zero_grad(set_to_none=False) between backward pass and the reading of gradients")
def zeroed_and_read(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        t.note("gradients", [p.grad is not None and float(p.grad.abs().sum()) for p in model.parameters()])
        t.end_step()


@attack("gradients", "an alias of the bound zero_grad was taken before the plan was put on")
def zero_grad_alias(t: Trial) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    zero = optimizer.zero_grad
    t.apply(model, optimizer)
    for step in range(4):
        zero(set_to_none=False)
        loss = model(*tokens(step))
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "a flat buffer of which every gradient is a view (flat gradients)")
def flat_gradient_buffer(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    parameters = list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters))

    def attach() -> None:
        offset = 0
        for parameter in parameters:
            parameter.grad = flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()

    attach()
    t.apply(model, optimizer)
    for step in range(4):
        flat.zero_()
        loss = model(*tokens(step))
        loss.backward()
        t.note("norm", flat.norm())
        flat.mul_(0.5)
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "a list of p.grad kept by reference and read in later steps")
def gradients_kept(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    kept: list[torch.Tensor] = []
    for step in range(4):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        kept.extend(p.grad for p in model.parameters() if p.grad is not None)
        optimizer.step()
        t.note("kept", [float(g.sum()) for g in kept])
        t.end_step()


@attack("gradients", "gradients are logged after the step")
def logged_after_step(t: Trial) -> None:
    model = Net()

    def log(_: int) -> None:
        t.note("gradients", {n: p.grad.norm() for n, p in model.named_parameters() if p.grad is not None})

    train(t, model, after=log)


@attack("gradients", "only parameters whose gradient is None are reported (find_unused_parameters)")
def unused_reported(t: Trial) -> None:
    model = Net()
    t_unused: list[str] = []

    def report(_: int) -> None:
        t_unused[:] = [name for name, p in model.named_parameters() if p.grad is None]
        t.note("unused", list(t_unused))

    train(t, model, between=report)


@attack("gradients", "parameters are unfrozen and added to the optimizer while training")
def unfreezing(t: Trial) -> None:
    model = Net()
    model.stem.requires_grad_(False)
    optimizer = sgd(model)

    def unfreeze(step: int) -> None:
        if step == 1:
            model.stem.requires_grad_(True)
            optimizer.add_param_group({"params": list(model.stem.parameters())})

    train(t, model, optimizer, num_steps=5, after=unfreeze)


@attack("gradients", "parameters are unfrozen that the optimizer has held all the time")
def unfreezing_held(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    model.stem.requires_grad_(False)

    def unfreeze(step: int) -> None:
        if step == 1:
            model.stem.requires_grad_(True)

    train(t, model, optimizer, num_steps=5, after=unfreeze)


@attack("gradients", "blocks are frozen while training, whose momentum goes on without gradients")
def freezing_later(t: Trial) -> None:
    model = Net()

    def freeze(step: int) -> None:
        if step == 1:
            model.blocks[0].requires_grad_(False)

    train(t, model, num_steps=5, after=freeze)


@attack("gradients", "a learning rate set between backward pass and step (warm-up written by hand)")
def rate_set_between(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)

    def warm_up(step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * (step + 1)

    train(t, model, optimizer, between=warm_up)


@attack("gradients", "groups with schedules of their own, changed before the forward")
def rates_by_group(t: Trial) -> None:
    model = Net()
    groups = [{"params": model.blocks.parameters(), "lr": 0.1}, {"params": model.head.parameters(), "lr": 0.01}]
    optimizer = torch.optim.SGD(groups, momentum=0.9)

    def schedule(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        optimizer.param_groups[1]["weight_decay"] = 0.1 * step

    train(t, model, optimizer, before=schedule)


@attack("gradients", "the learning rate is a tensor that is written to between backward pass and step")
def rate_is_tensor(t: Trial) -> None:
    model = Net()
    rate = torch.tensor(0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    def warm_up(step: int) -> None:
        rate.fill_(0.02 * (step + 1))

    train(t, model, optimizer, between=warm_up)


@attack("gradients", "an exponential moving average of the weights after each step")
def weight_average(t: Trial) -> None:
    model = Net()
    average = copy.deepcopy(model)

    def update(_: int) -> None:
        with torch.no_grad():
            for kept, parameter in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(parameter.to(kept.dtype), 0.1)

    t.track(average)
    train(t, model, after=update)


@attack("gradients", "weights are read between backward pass and step (a trust region)")
def weights_read_between(t: Trial) -> None:
    model = Net()
    train(t, model, between=lambda _: t.note("weights", [p.norm() for p in model.parameters()]))


@attack("gradients", "weights are changed between backward pass and step (decoupled decay by hand)")
def weights_decayed_between(t: Trial) -> None:
    model = Net()
    # All of them are written to in the middle of a step.
    t.writes_within_step("")

    def decay(_: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)

    train(t, model, adamw(model), between=decay)


@attack("gradients", "the gradient of one row is zeroed before the step (a frozen token)")
def row_zeroed(t: Trial) -> None:
    model = Net()

    def zero(_: int) -> None:
        if model.head.weight.grad is not None:
            model.head.weight.grad[0] = 0.0

    train(t, model, between=zero)


@attack("gradients", "gradients are flattened with parameters_to_vector and written back")
def vectors_of_parameters(t: Trial) -> None:
    model = Net()

    def move(_: int) -> None:
        vector = parameters_to_vector(model.parameters())
        vector_to_parameters(vector.detach() * 0.99, model.parameters())

    train(t, model, after=move)


@attack("gradients", "Module.zero_grad of the model, and of a part of it")
def zeroed_by_module(t: Trial) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.05)
    t.apply(model, optimizer)
    for step in range(4):
        model.blocks.zero_grad(set_to_none=False)
        if step % 2:
            model.zero_grad(set_to_none=False)
        loss = model(*tokens(step))
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "a GradScaler: scale, unscale_, step, update")
def grad_scaler(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(*tokens(step))
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        t.note("loss", loss)
        t.note("scale", scaler.get_scale())
        t.end_step()
