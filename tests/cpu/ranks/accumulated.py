"""Programs of one card whose layout has each rank run its part of a batch in micro-batches, for models that return their loss."""

from typing import Any

import torch
from tests.cpu.ranks.programs import data, mlp, program, result_of, tokens, trained
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.gelu(self.inner(x))


class Classifier(nn.Module):
    """Its loss leaves out targets, and weighs the others; it returns its scores too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.Sequential(Layer(), Layer()), nn.Linear(8, 4)
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 0.5, 3.0]))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        scores = self.head(self.layers(x))
        return functional.cross_entropy(scores, y, weight=self.weights, ignore_index=-1), scores


@program(recomputes=("Classifier.layers.0",), micro_batch=2, shards_states=True)
def accumulated() -> Any:
    """Recomputed too; uneven parts, one whose targets are all left out, a last batch that needs no micro-batches and one of fewer examples than ranks, a GradScaler, clipping, two calls for a step."""
    model, losses = Classifier(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    batches = [*data(3, 7), *data(1, 3), *data(1, 1)]
    batches[1][1][4:] = -1
    for x, y in batches:
        loss, scores = model(x, y)
        (other, _) = model(x + 0.1, y)
        scaler.scale(0.3 * loss + other**2).backward()
        scaler.unscale_(optimizer)
        losses += [loss.item(), scores.sum().item(), nn.utils.clip_grad_norm_(model.parameters(), 0.3).item()]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return result_of(model, losses=losses)


class Masked(nn.Module):
    """Leaves the mask out where nothing is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 8), nn.Linear(8, 30)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens)
        scores = h @ h.transpose(1, 2)
        if not bool(mask.all()):
            scores = scores.masked_fill(mask[:, None] == 0, -1e9)
        return functional.cross_entropy(self.head(scores.softmax(-1) @ h).flatten(0, 1), labels.flatten())


@program(micro_batch=1)
def accumulated_with_padding() -> Any:
    """Of all micro-batches of all ranks one has padding: they go by the whole batch."""
    model, batches = Masked(), []
    for step, (x, y) in enumerate(tokens(4, 5, is_padded=False)):
        mask = torch.ones_like(x)
        mask[(4, 0, 3, 1)[step % 4], 5:] = step == 0
        batches.append(((x, mask), y))
    return trained(model, batches, None, lambda x, y: model(*x, y))


@program(micro_batch=1)
def accumulated_with_its_loss_outside() -> Any:
    return trained(mlp(), data(3))


class TwoMeans(Classifier):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        scores = self.head(self.layers(x))
        return functional.cross_entropy(scores, y, ignore_index=0) + functional.cross_entropy(scores, y, ignore_index=1)


@program(micro_batch=1)
def accumulated_means_of_other_numbers() -> Any:
    """Alike in all micro-batches of a rank, and not between the ranks."""
    model = TwoMeans()
    return trained(model, [(torch.randn(6, 8), torch.tensor([0, 0, 0, 1, 1, 1]))], None, model)


@program(micro_batch=1)
def accumulated_with_weights_that_change() -> Any:
    model = Classifier()

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss, _ = model(x, y)
        model.head.weight.data.mul_(0.99)
        return loss

    return trained(model, data(3, 5), None, loss_of)


@program(micro_batch=1)
def accumulated_within_a_checkpoint() -> Any:
    model = Classifier()
    return trained(model, data(3, 4), None, lambda x, y: checkpoint(model, x, y, use_reentrant=False)[0])
