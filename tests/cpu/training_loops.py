"""Training loops that treat gradients and weights in ways of their own; what they return is compared between runs."""

import copy
import io
from typing import Any

import pytest
import torch
from tests.conformance.large_models import Decoder
from torch import nn
from torch.utils.checkpoint import checkpoint

Optimizer = torch.optim.Optimizer


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 50, (2, 20), generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def train(model: nn.Module, optimizer: Optimizer, seed: int) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = model(tokens(seed))
    loss.backward()
    optimizer.step()
    return loss.detach()


def accumulates(model: Decoder, optimizer: Optimizer) -> Any:
    for seed in range(6):
        model(tokens(seed)).backward()
        if seed % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


def keeps_zeros(model: Decoder, optimizer: Optimizer) -> Any:
    for seed in range(3):
        optimizer.zero_grad(set_to_none=False)
        model(tokens(seed)).backward()
        optimizer.step()


def clips(model: Decoder, optimizer: Optimizer) -> Any:
    norms = []
    for seed in range(3):
        optimizer.zero_grad()
        model(tokens(seed)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
    return norms


def keeps_gradients(model: Decoder, optimizer: Optimizer) -> Any:
    kept = []
    for seed in range(4):
        train(model, optimizer, seed)
        kept += [p.grad for p in model.parameters()]
    return kept


def keeps_views(model: Decoder, optimizer: Optimizer) -> Any:
    kept = []
    for seed in range(4):
        train(model, optimizer, seed)
        kept += [p.grad.view(-1)[:3] for p in model.parameters() if p.grad is not None]
    return kept


def flat_buffer(model: Decoder, optimizer: Optimizer) -> Any:
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    at = 0
    for p in model.parameters():
        p.grad = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    for seed in range(3):
        flat.zero_()
        model(tokens(seed)).backward()
        flat.mul_(0.5)
        optimizer.step()
    return [flat]


def by_hand(model: Decoder, _: Optimizer) -> Any:
    for seed in range(3):
        model(tokens(seed)).backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p.data.add_(p.grad, alpha=-0.1)
                p.grad = None


def steps_in_hooks(model: Decoder, _: Optimizer) -> Any:
    own = {p: torch.optim.SGD([p], lr=0.1, momentum=0.5) for p in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        own[parameter].step()
        own[parameter].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(update) for p in model.parameters()]
    for seed in range(3):
        model(tokens(seed)).backward()
    for handle in handles:
        handle.remove()


def halves_in_hooks(model: Decoder, optimizer: Optimizer) -> Any:
    seen: list[torch.Tensor] = []
    handles = [p.register_hook(lambda g: (seen.append(g), g * 0.5)[1]) for p in model.parameters()]
    for seed in range(2):
        train(model, optimizer, seed)
    for handle in handles:
        handle.remove()
    return seen


def regularises(model: Decoder, optimizer: Optimizer) -> Any:
    for seed in range(3):
        optimizer.zero_grad()
        loss = model(tokens(seed)) + 0.01 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        optimizer.step()


def second_order(model: Decoder, optimizer: Optimizer) -> Any:
    for seed in range(2):
        optimizer.zero_grad()
        loss = model(tokens(seed))
        found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + sum(g.square().sum() for g in found)).backward()
        optimizer.step()


def with_graphs(model: Decoder, optimizer: Optimizer) -> Any:
    hidden = model.embedding(tokens()).detach()
    for _ in range(2):
        optimizer.zero_grad()
        for number in (0, 2, 0):
            hidden = model.blocks[number](hidden).detach()
        checkpoint(model.blocks[1], hidden, use_reentrant=False).square().mean().backward(retain_graph=False)
        checkpoint(model.blocks[3], hidden.requires_grad_(), use_reentrant=True).square().mean().backward()
        hidden = hidden.detach()
        optimizer.step()
    return [hidden]


def twice_through(model: Decoder, optimizer: Optimizer) -> Any:
    for seed in range(2):
        loss = model(tokens(seed))
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()


def in_a_closure(model: Decoder, optimizer: Optimizer) -> Any:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(tokens())
        loss.backward()
        return loss

    return [optimizer.step(closure) for _ in range(3)]  # type: ignore[list-item]


def fails_half_way(model: Decoder, optimizer: Optimizer) -> Any:
    def fail(*_: Any) -> None:
        raise ValueError("half way")

    train(model, optimizer, 0)
    optimizer.zero_grad()
    handle = model.blocks[1].register_full_backward_hook(fail)
    with pytest.raises(ValueError, match="half way"):
        model(tokens(1)).backward()
    handle.remove()
    optimizer.zero_grad()
    train(model, optimizer, 2)


def saves_and_loads(model: Decoder, optimizer: Optimizer) -> Any:
    train(model, optimizer, 0)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, 1)
    file.seek(0)
    saved = torch.load(file)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    train(model, optimizer, 2)
    return list(saved["model"].values())


def averages(model: Decoder, optimizer: Optimizer) -> Any:
    average = torch.optim.swa_utils.AveragedModel(model)
    for seed in range(3):
        train(model, optimizer, seed)
        average.update_parameters(model)
    return list(average.module.state_dict().values())


def schedules_and_scales(model: Decoder, optimizer: Optimizer) -> Any:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    for seed in range(4):
        optimizer.zero_grad()
        scaler.scale(model(tokens(seed))).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()


def freezes_some(model: Decoder, optimizer: Optimizer) -> Any:
    model.blocks[1].requires_grad_(False)
    for seed in range(2):
        train(model, optimizer, seed)
    model.blocks[1].requires_grad_(True)
    for seed in range(2):
        train(model, optimizer, seed)


def copies(model: Decoder, optimizer: Optimizer) -> Any:
    train(model, optimizer, 0)
    other = copy.deepcopy(model)
    other(tokens(3)).backward()
    return [*other.parameters(), *gradients(other)]


def evaluates_between(model: Decoder, optimizer: Optimizer) -> Any:
    found = []
    for seed in range(2):
        optimizer.zero_grad()
        loss = model(tokens(seed))
        with torch.no_grad():
            found.append(model(tokens(7)))
        loss.backward()
        with torch.inference_mode():
            found.append(model(tokens(8)).clone())
        optimizer.step()
    return found


def predicts_with_gradients_held(model: Decoder, optimizer: Optimizer) -> Any:
    kept = []
    for seed in range(3):
        optimizer.zero_grad()
        model(tokens(seed)).backward()
        kept += [p.grad for p in model.parameters()]
        for p in model.parameters():
            if p.grad is not None:
                p.grad = p.grad * 0.5
        with torch.inference_mode():
            kept.append(model(tokens(8)).clone())
        optimizer.step()
    return kept


def with_autocast(model: Decoder, optimizer: Optimizer) -> Any:
    for seed in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens(seed))
        loss.backward()
        optimizer.step()


def gives_gradients(model: Decoder, optimizer: Optimizer) -> Any:
    found = torch.autograd.grad(model(tokens()), list(model.parameters()))
    for p, g in zip(model.parameters(), found, strict=True):
        p.grad = g
    optimizer.step()
    return found


def skips_blocks(model: Decoder, optimizer: Optimizer) -> Any:
    for numbers in ((0, 1, 2, 3), (0, 3), (2, 1)):
        optimizer.zero_grad()
        hidden = model.embedding(tokens())
        for number in numbers:
            hidden = model.blocks[number](hidden)
        hidden.square().mean().backward()
        optimizer.step()


LOOPS = (
    accumulates,
    keeps_zeros,
    clips,
    keeps_gradients,
    keeps_views,
    flat_buffer,
    by_hand,
    steps_in_hooks,
    halves_in_hooks,
    regularises,
    second_order,
    with_graphs,
    twice_through,
    in_a_closure,
    fails_half_way,
    saves_and_loads,
    averages,
    schedules_and_scales,
    freezes_some,
    copies,
    evaluates_between,
    predicts_with_gradients_held,
    with_autocast,
    gives_gradients,
    skips_blocks,
)
