"""Loops that from some step on do what they had not done before: exchange weights as tensors, cast a model and back, scale losses."""

import contextlib

import torch
from tests.attacks.models import Net, adamw, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn

LATE, STEPS = 4, 7


@attack(
    "changes",
    "from step 4 on each weight is exchanged for a smaller one with swap_tensors, where torch lets it (its error is caught)",
)
def weights_swapped_late(t: Trial) -> None:
    model = Net()
    t.writes_within_step("")

    def swap(step: int) -> None:
        if step < LATE:
            return
        for parameter in model.parameters():
            with contextlib.suppress(RuntimeError):
                torch.utils.swap_tensors(
                    parameter, nn.Parameter(parameter.detach() * 0.9, requires_grad=parameter.requires_grad)
                )

    train(t, model, num_steps=STEPS, before=swap)


@attack(
    "gradients",
    "weights are exchanged with swap_tensors between backward pass and step, and get hooks after their accumulation then",
    only=EXACT,
)
def weights_swapped_between_passes(t: Trial) -> None:
    model = Net()
    t.writes_within_step("")

    def halve(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    def swap(step: int) -> None:
        if step != LATE:
            return
        for parameter in model.parameters():
            other = nn.Parameter(parameter.detach() * 0.9, requires_grad=parameter.requires_grad)
            other.grad = None if parameter.grad is None else parameter.grad.clone()
            torch.utils.swap_tensors(parameter, other)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(halve)

    train(t, model, num_steps=STEPS, between=swap)


@attack(
    "gradients",
    "from step 4 on the model is halved and cast back between backward pass and step, gradients with it (a check of half precision)",
    only=EXACT,
)
def halved_between_passes(t: Trial) -> None:
    model = Net()
    whole = torch.get_default_dtype()

    def halve(step: int) -> None:
        if step >= LATE:
            model.half()
            model.to(whole)

    train(t, model, adamw(model), num_steps=STEPS, between=halve)


@attack(
    "gradients",
    "the model is cast to bfloat16 and back in every second step between backward pass and step, with frozen weights first in its order",
    only=EXACT,
)
def cast_between_passes(t: Trial) -> None:
    model = Net()
    model.stem.requires_grad_(False)
    whole = torch.get_default_dtype()

    def cast(step: int) -> None:
        if step % 2:
            model.bfloat16()
            model.to(whole)

    train(t, model, sgd(model), num_steps=STEPS, between=cast)


@attack(
    "gradients",
    "a GradScaler with a fused optimizer, which unscales within its step; from step 4 on the loop unscales and clips",
    only=EXACT,
)
def scaled_with_fused_optimizer(t: Trial) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    t.apply(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*tokens(step))
        scaler.scale(loss).backward()
        if step >= LATE:
            scaler.unscale_(optimizer)
            t.note("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        scaler.step(optimizer)
        scaler.update()
        t.note("loss", loss)
        t.note("scale", scaler.get_scale())
        t.end_step()
