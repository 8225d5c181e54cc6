"""Blocks that write in place to the results of their products, which selective checkpoints keep: activations, gates, dropout, past torch, later, from outside."""

from collections.abc import Callable

import torch
from tests.attacks.models import WIDTH, Block, Net, sgd, tokens, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional

Change = Callable[[nn.Module, torch.Tensor], torch.Tensor]
RERUN = (
    "checkpointing",
    "selective checkpointing",
    "nested checkpointing",
    "sequential checkpointing",
    "offloaded checkpointing",
    "offloaded checkpointing, selective",
    "activation offload",
    "tiled tokens",
    "micro-batches",
    "update in backward",
)


def with_blocks(change: Change) -> Net:
    """Two blocks whose first product goes through `change`."""

    class Writing(Block):
        def __init__(self) -> None:
            super().__init__()
            self.num_calls = 0

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return self.narrow(change(self, self.wide(self.norm(x))))

    return Net([Writing(), Writing()])


@attack("recomputation", "the activation writes in place to the product before it", only=RERUN)
def activation_in_place(t: Trial) -> None:
    train(t, with_blocks(lambda _, h: functional.silu(h, inplace=True)))


@attack(
    "recomputation", "a product is multiplied in place by a gate that is made of it (squeeze and excite)", only=RERUN
)
def gate_in_place(t: Trial) -> None:
    train(t, with_blocks(lambda _, h: h.clone().mul_(h.mean(-1, keepdim=True).sigmoid()).relu_()))


@attack("recomputation", "a product is shifted in place, which nothing has saved yet", only=RERUN)
def shifted_in_place(t: Trial) -> None:
    train(t, with_blocks(lambda _, h: torch.tanh(h.add_(0.5))))


@attack("recomputation", "half of a product is written in place through a view of it", only=RERUN)
def view_in_place(t: Trial) -> None:
    def change(_: nn.Module, h: torch.Tensor) -> torch.Tensor:
        h[..., :WIDTH].tanh_()
        return h * 1.5

    train(t, with_blocks(change))


@attack("recomputation", "dropout in place on a product, and one more behind it", only=RERUN)
def dropout_in_place(t: Trial) -> None:
    train(t, with_blocks(lambda _, h: functional.dropout(functional.dropout(h, 0.3, inplace=True).tanh(), 0.3)))


@attack(
    "recomputation", "a product is written in place in each third call alone, by a counter of the block", only=RERUN
)
def in_place_in_each_third_call(t: Trial) -> None:
    def change(block: nn.Module, h: torch.Tensor) -> torch.Tensor:
        block.num_calls += 1
        return functional.gelu(h.mul_(0.5) if not block.num_calls % 3 else h)

    train(t, with_blocks(change), num_steps=7)


@attack("recomputation", "a product is clamped in place without gradients, as activations that spike are", only=RERUN)
def clamped_without_gradients(t: Trial) -> None:
    def change(_: nn.Module, h: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            h.clamp_(max=0.2)
        return torch.tanh(h)

    train(t, with_blocks(change))


@attack("recomputation", "a product is scaled through .data from the fourth call on", only=RERUN)
def written_past_torch_later(t: Trial) -> None:
    def change(block: nn.Module, h: torch.Tensor) -> torch.Tensor:
        block.num_calls += 1
        if block.num_calls > 3:
            h.data.mul_(0.5)
        return torch.tanh(h)

    train(t, with_blocks(change), num_steps=7)


@attack("recomputation", "a product is scaled through numpy from the fourth call on", only=RERUN)
def written_through_numpy_later(t: Trial) -> None:
    def change(block: nn.Module, h: torch.Tensor) -> torch.Tensor:
        block.num_calls += 1
        if block.num_calls > 3:
            h.detach().numpy()[...] *= 0.5
        return torch.tanh(h)

    train(t, with_blocks(change), num_steps=7)


@attack(
    "recomputation",
    "a product of several dimensions, without a bias, is scaled in place from the fifth call on",
    only=RERUN,
)
def in_place_through_another_tensor_later(t: Trial) -> None:
    def change(block: nn.Module, h: torch.Tensor) -> torch.Tensor:
        block.num_calls += 1
        # The product itself is a matrix, whose versions do not count what is written to this one.
        h = h @ block.mixed
        return torch.tanh(h.mul_(0.5) if block.num_calls > 4 else h)

    model = with_blocks(change)
    for block in model.blocks:
        block.mixed = nn.Parameter(torch.eye(2 * WIDTH) + 0.1)
    train(t, model, num_steps=7)


@attack("recomputation", "a hook on the inner layer writes in place to the product that it is shown", only=RERUN)
def written_by_a_hook(t: Trial) -> None:
    model = with_blocks(lambda _, h: torch.tanh(h))
    for block in model.blocks:
        block.wide.register_forward_hook(lambda _, __, out: out.mul_(0.5))
    train(t, model)


@attack(
    "recomputation",
    "a product that the block hands out is written in place between the passes; nothing has saved it",
    only=RERUN,
)
def handed_out_and_written_between(t: Trial) -> None:
    def change(block: nn.Module, h: torch.Tensor) -> torch.Tensor:
        block.hidden = h.detach()
        return torch.tanh(h + 0.5)

    model = with_blocks(change)
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        for block in model.blocks:
            block.hidden.mul_(3.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.note("hidden", model.blocks[0].hidden)
        t.end_step()


@attack(
    "recomputation", "a product that the block hands out is normalised in place by the loop after the step", only=RERUN
)
def handed_out_and_written_after(t: Trial) -> None:
    def change(block: nn.Module, h: torch.Tensor) -> torch.Tensor:
        block.hidden = h.detach()
        return torch.tanh(h.add_(0.1))

    model = with_blocks(change)
    train(t, model, after=lambda _: [block.hidden.div_(block.hidden.norm()) for block in model.blocks])


@attack("recomputation", "activations in place, and the graph is gone through backwards twice", only=RERUN)
def in_place_and_twice(t: Trial) -> None:
    model = with_blocks(lambda _, h: functional.silu(h.sub_(0.1)))
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        (0.5 * loss).backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "recomputation",
    "normalisation over the batch behind a product, then an activation in place, as convolutional nets have it",
    only=RERUN,
)
def normalised_and_in_place(t: Trial) -> None:
    class Normalised(Block):
        def __init__(self) -> None:
            super().__init__()
            self.over_batch = nn.BatchNorm1d(2 * WIDTH)

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            h = self.over_batch(self.wide(x).transpose(1, 2))
            h = functional.hardswish(h.mul_(0.9), inplace=True)
            return self.narrow(h.transpose(1, 2)).mul_(0.5)

    train(t, Net([Normalised(), Normalised()]))
