"""Gradients that the loop fills with zeros (`set_to_none=False`), and what refers to them while a backward pass adds to them."""

import torch
from tests.attacks.models import Net, adamw, sgd, tokens
from tests.attacks.registry import attack
from tests.attacks.trial import Trial


@attack("gradients", "gradients are zeroed, a list of them is taken, and read after the backward pass")
def zeros_held(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        held = [parameter.grad for parameter in model.parameters()]
        loss = model(*tokens(step))
        loss.backward()
        if step:
            t.note("norms", [gradient.abs().sum() for gradient in held])
        t.note("loss", loss)
        optimizer.step()
        t.end_step()


@attack("gradients", "views of zeroed gradients are taken by .data from step 3 on, and read after the backward pass")
def zeros_held_by_data_late(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(5):
        optimizer.zero_grad(set_to_none=False)
        held = [parameter.grad.data for parameter in model.parameters()] if step > 1 else []
        loss = model(*tokens(step))
        loss.backward()
        if held:
            t.note("norms", [gradient.abs().sum() for gradient in held])
        t.note("loss", loss)
        optimizer.step()
        t.end_step()


@attack("gradients", "the zeroed gradient of one layer is set on another one too, so that both add to it")
def zeros_on_two_parameters(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    first, second = model.blocks
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        if step == 1:
            first.wide.weight.grad = second.wide.weight.grad
        loss = model(*tokens(step))
        loss.backward()
        t.note("loss", loss)
        optimizer.step()
        t.end_step()


@attack(
    "gradients",
    "a list of the gradients is taken once, after the first step's backward pass, and clipped in every step",
)
def gradients_listed_once(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    listed: list[torch.Tensor] = []
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        loss = model(*tokens(step))
        loss.backward()
        listed = listed or [parameter.grad for parameter in model.parameters()]
        norm = torch.stack(torch._foreach_norm(listed)).norm()
        torch._foreach_mul_(listed, float(0.5 / norm))
        t.note("norm", norm)
        t.note("loss", loss)
        optimizer.step()
        t.end_step()


@attack(
    "gradients", "a list of the gradients is taken once, filled with zeros by hand, and read after the backward pass"
)
def gradients_listed_once_and_zeroed(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    listed: list[torch.Tensor] = []
    t.apply(model, optimizer)
    for step in range(4):
        for gradient in listed:
            gradient.zero_()
        loss = model(*tokens(step))
        loss.backward()
        listed = listed or [parameter.grad for parameter in model.parameters()]
        t.note("sum", sum(gradient.sum() for gradient in listed))
        t.note("loss", loss)
        optimizer.step()
        t.end_step()
