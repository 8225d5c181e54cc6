"""Modes around parts of a step, and several optimizers of which one is unknown."""

from typing import Any

import torch
from tests.attacks.models import NUM_CLASSES, WIDTH, Net, sgd, tokens
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class ScalesSums(TorchDispatchMode):
    """Scales every sum, of integers too, which are no integers then."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 1.5 if func.overloadpacket is torch.ops.aten.sum else result


class ScalesExponents(TorchDispatchMode):
    """Scales every product of matrices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return (
            result * 1.25
            if func.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten._softmax_backward_data)
            else result
        )


@attack(
    "recomputation", "a mode of the program's around the whole step scales every sum by one and a half, of integers too"
)
def sums_scaled_by_mode(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        with ScalesSums():
            loss = model(*tokens(step))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "recomputation",
    "a mode of the program's around the backward pass alone scales every sum by one and a half, of integers too",
)
def sums_scaled_in_backward(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        with ScalesSums():
            loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


class Attention(nn.Module):
    is_attention = True

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out((q @ k.transpose(-1, -2) / 3).softmax(-1) @ v)


@attack(
    "gradients", "a mode of the program's around the backward pass alone scales products and the softmax's derivative"
)
def attention_scaled_in_backward(t: Trial) -> None:
    model = Net([Attention(), Attention()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        with ScalesExponents():
            loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


class Words(Net):
    """An embedding with sparse gradients before the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_CLASSES, WIDTH, sparse=True)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        logits = self.head(self.blocks(self.words(x)))
        return logits if y is None else self.loss(logits, y)


def words(step: int) -> Any:
    y = tokens(step)[1]
    return y.roll(1, 1), y


@attack("gradients", "SparseAdam for the embedding is stepped first, then AdamW for the rest")
def sparse_adam_first(t: Trial) -> None:
    model = Words()
    sparse = torch.optim.SparseAdam(list(model.words.parameters()), lr=0.01)
    rest = torch.optim.AdamW([*model.blocks.parameters(), *model.head.parameters()], lr=0.01)
    t.apply(model, sparse, rest)
    for step in range(4):
        loss = model(*words(step))
        sparse.zero_grad()
        rest.zero_grad()
        loss.backward()
        sparse.step()
        rest.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "the same, where the plan knows the second optimizer alone")
def sparse_adam_unknown(t: Trial) -> None:
    model = Words()
    sparse = torch.optim.SparseAdam(list(model.words.parameters()), lr=0.01)
    rest = torch.optim.AdamW([*model.blocks.parameters(), *model.head.parameters()], lr=0.01)
    t.apply(model, rest)
    for step in range(4):
        loss = model(*words(step))
        sparse.zero_grad()
        rest.zero_grad()
        loss.backward()
        sparse.step()
        rest.step()
        t.note("loss", loss)
        t.end_step()


class ByHand(torch.optim.Optimizer):
    """Signs."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.sign(), alpha=group["lr"])


@attack(
    "gradients", "an optimizer written by hand for the head, unknown to the plan, is stepped before AdamW for the body"
)
def by_hand_unknown_first(t: Trial) -> None:
    model = Net()
    head = ByHand(model.head.parameters())
    body = torch.optim.AdamW([*model.stem.parameters(), *model.blocks.parameters()], lr=0.01)
    t.apply(model, body)
    for step in range(4):
        loss = model(*tokens(step))
        head.zero_grad()
        body.zero_grad()
        loss.backward()
        head.step()
        body.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "the same, stepped after AdamW")
def by_hand_unknown_last(t: Trial) -> None:
    model = Net()
    head = ByHand(model.head.parameters())
    body = torch.optim.AdamW([*model.stem.parameters(), *model.blocks.parameters()], lr=0.01)
    t.apply(model, body)
    for step in range(4):
        loss = model(*tokens(step))
        head.zero_grad()
        body.zero_grad()
        loss.backward()
        body.step()
        head.step()
        t.note("loss", loss)
        t.end_step()
