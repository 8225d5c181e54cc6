"""Programs of one card whose layout streams the weights of blocks from the host, within each rank's part."""

import copy
from typing import Any

import torch
from tests.cpu.ranks.programs import data, program, result_of, trained
from tests.cpu.ranks.recomputed import Block, Blocks
from torch import nn
from torch.nn import functional

STREAMED = {
    "where": "Blocks",
    "blocks": ["blocks.0", "blocks.1", "blocks.2"],
    "smallest_bytes": 1,
    "host_bytes": 1 << 16,
}


def _loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x), y)


@program(streamed=STREAMED, recomputes=("Blocks.blocks.1",), shards_states=True)
def streamed() -> Any:
    """An uneven batch, an evaluation and an average of the weights between, gradients that are added up over two batches and kept by the program, states that are saved and loaded."""
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = [p.detach().clone() for p in model.parameters()]
    kept: list[Any] = []
    sums, norms = [], []
    for step, (x, y) in enumerate(data(6, 7)):
        _loss(model, x, y).backward()
        if step == 0:
            kept = [p.grad for p in model.parameters()]
        if step % 2 == 0:
            continue
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        if step == 3:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        optimizer.zero_grad(set_to_none=step > 3)
        with torch.no_grad():
            for own, p in zip(average, model.parameters(), strict=True):
                own.lerp_(p, 0.1)
            sums.append(model.eval()(x).sum())
            model.train()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    found = trained(model, data(2, 7), optimizer, lambda x, y: _loss(model, x, y))
    states = optimizer.state_dict()["state"]
    return found | {
        "sums": torch.stack(sums),
        "norms": torch.stack(norms),
        **{f"kept {n}": each.clone() for n, each in enumerate(kept)},
        **{f"average {n}": each for n, each in enumerate(average)},
        **{f"state {n}": states[n]["exp_avg_sq"] for n in states},
    }


@program(streamed=STREAMED)
def streamed_with_scaled_losses() -> Any:
    """A scaler whose first step is skipped, two losses through one graph, frozen and later trained weights, a group that joins, noise that is added to gradients."""
    model = Blocks()
    for p in model.blocks[2].parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=2)
    for step, (x, y) in enumerate(data(6)):
        out = model(x)
        scaler.scale(out.pow(2).mean()).backward(retain_graph=True)
        scaler.scale(functional.cross_entropy(out, y)).backward()
        scaler.unscale_(optimizer)
        for p in model.parameters():
            if p.grad is not None:
                p.grad.add_(torch.linspace(-1e-3, 1e-3, p.numel()).view(p.shape))
        scaler.step(optimizer)
        scaler.update(1024.0 if step == 0 else None)
        optimizer.zero_grad()
        if step == 3:
            for p in model.blocks[2].parameters():
                p.requires_grad_(True)
            optimizer.add_param_group({"params": model.blocks[2].parameters(), "lr": 0.05})
    return result_of(model)


@program(streamed=STREAMED, shards_states=True)
def streamed_with_weights_in_the_loss() -> Any:
    """Weights have a gradient from outside of the model too, and the model is called twice for one backward pass; a momentum that is read, weights that are averaged in place."""
    model = Blocks()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    before = [p.detach().clone() for p in model.parameters()]
    losses = []
    for x, y in data(4, 7):
        optimizer.zero_grad()
        penalty = sum((p - own).pow(2).sum() for p, own in zip(model.parameters(), before, strict=True))
        loss = _loss(model, x, y) + _loss(model, x.flip(0), y) + 0.1 * penalty
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for p, own in zip(model.parameters(), before, strict=True):
                p.lerp_(own, 0.25)
        losses.append(loss)
    return result_of(model, losses=losses)


@program(streamed=STREAMED)
def streamed_and_copied() -> Any:
    """A copy of the model, which is trained by hand, and a block that is replaced."""
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = trained(model, data(2), optimizer, lambda x, y: _loss(model, x, y))
    other = copy.deepcopy(model)
    for x, y in data(2):
        _loss(other, x, y).backward()
        with torch.no_grad():
            for p in other.parameters():
                p.sub_(p.grad, alpha=0.1)
                p.grad = None
    model.blocks[1] = Block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found |= trained(model, data(2), optimizer, lambda x, y: _loss(model, x, y))
    return found | {f"other {name}": p for name, p in other.state_dict().items()}


@program(streamed=STREAMED)
def streamed_with_a_hook_on_a_weight() -> Any:
    model = Blocks()
    model.blocks[0].inner.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return trained(model, data(2))


@program(streamed=STREAMED)
def streamed_with_a_hook_after_a_gradient() -> Any:
    """Of a weight that is not streamed: it would see the gradient of a part."""
    model = Blocks()
    model.head.weight.register_post_accumulate_grad_hook(lambda weight: weight.grad.mul_(0.5))
    return trained(model, data(2))


@program(streamed=STREAMED)
def streamed_with_gradients_by_name() -> Any:
    model = Blocks()
    for x, y in data(2):
        _loss(model, x, y).backward(inputs=[model.head.weight])
    return result_of(model, gradient=model.head.weight.grad)


@program(streamed={**STREAMED, "blocks": ["blocks.7"]})
def streamed_elsewhere() -> Any:
    return trained(Blocks(), data(3))


@program(streamed=STREAMED, shards_states=True, ranks=4)
def streamed_into_a_flat_buffer() -> Any:
    """Gradients are views of one buffer of the program's, which is added to twice, clipped and zeroed as a whole."""
    model = Blocks()
    parameters = list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters))
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad = part.view(p.shape)
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    losses = []
    for x, y in data(4, 9):
        flat.zero_()
        for _ in range(2):
            loss = _loss(model, x, y)
            loss.backward()
        flat.mul_(min(1.0, 0.5 / (float(flat.norm()) + 1e-6)))
        optimizer.step()
        losses.append(loss)
    return result_of(model, losses=losses) | {"flat": flat.clone()}
