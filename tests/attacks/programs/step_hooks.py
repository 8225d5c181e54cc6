"""Hooks of the program's own on parameters and on the optimizer's step."""

from typing import Any

import torch
from tests.attacks.models import Net, sgd, tokens, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial


@attack("gradients", "tensor hooks on parameters scale gradients (p.register_hook)")
def parameter_hooks(t: Trial) -> None:
    model = Net()
    for parameter in model.blocks.parameters():
        parameter.register_hook(lambda gradient: 0.1 * gradient)
    train(t, model)


@attack("gradients", "a post-accumulate hook of the program's own, registered before the plan, scales gradients")
def own_accumulate_hook_before(t: Trial) -> None:
    model = Net()

    def scale(parameter: torch.Tensor) -> None:
        parameter.grad.mul_(0.1)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(scale)
    train(t, model)


@attack("gradients", "the same, registered after the plan was put on")
def own_accumulate_hook_after(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)

    def scale(parameter: torch.Tensor) -> None:
        parameter.grad.mul_(0.1)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(scale)
    train(t, model, optimizer, applied=True)


@attack("gradients", "a pre-step hook of the optimizer, registered before the plan, scales gradients")
def pre_step_hook_before(t: Trial) -> None:
    _step_hook(t, is_pre=True, is_before=True)


@attack("gradients", "a pre-step hook of the optimizer, registered after the plan was put on")
def pre_step_hook_after(t: Trial) -> None:
    _step_hook(t, is_pre=True, is_before=False)


@attack("gradients", "a post-step hook of the optimizer, registered before the plan, reads groups and gradients")
def post_step_hook_before(t: Trial) -> None:
    _step_hook(t, is_pre=False, is_before=True)


@attack("gradients", "a post-step hook of the optimizer, registered after the plan was put on")
def post_step_hook_after(t: Trial) -> None:
    _step_hook(t, is_pre=False, is_before=False)


def _step_hook(t: Trial, *, is_pre: bool, is_before: bool) -> None:
    model = Net()
    optimizer = sgd(model)

    def hook(seen: torch.optim.Optimizer, _: Any, __: Any) -> None:
        parameters = [p for group in seen.param_groups for p in group["params"]]
        t.note("groups", [len(group["params"]) for group in seen.param_groups])
        t.note("gradients", [p.grad.norm() for p in parameters if p.grad is not None])
        for parameter in parameters:
            if is_pre and parameter.grad is not None:
                parameter.grad.mul_(0.5)

    def register() -> None:
        (optimizer.register_step_pre_hook if is_pre else optimizer.register_step_post_hook)(hook)

    if is_before:
        register()
    t.apply(model, optimizer)
    if not is_before:
        register()
    train(t, model, optimizer, applied=True)


@attack("gradients", "a post-step hook that keeps weights on a sphere (weight normalisation)")
def post_step_projection(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)

    def project(seen: torch.optim.Optimizer, _: Any, __: Any) -> None:
        with torch.no_grad():
            for group in seen.param_groups:
                for parameter in group["params"]:
                    if parameter.dim() > 1:
                        parameter.div_(parameter.norm())

    optimizer.register_step_post_hook(project)
    train(t, model, optimizer)


@attack("gradients", "an exception in a step hook, which the loop catches; training goes on")
def exception_in_step_hook(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    calls = [0]

    def hook(_: Any, __: Any, ___: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise ValueError("once")

    t.apply(model, optimizer)
    optimizer.register_step_pre_hook(hook)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(*tokens(step))
        loss.backward()
        try:
            optimizer.step()
        except ValueError as error:
            t.caught(error)
        t.note("loss", loss)
        t.end_step()
