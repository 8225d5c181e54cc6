"""Programs of one card whose layout recomputes blocks within each rank's part."""

import contextlib
from typing import Any

import torch
from tests.cpu.ranks.programs import data, program, result_of, trained
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """A block, with dropout if it is asked for."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.inner, self.outer, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(rate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(self.drop(functional.gelu(self.inner(x))))


class Counted(Block):
    """A second run is no call."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return super().forward(x)


class Blocks(nn.Module):
    """Blocks, of which the first is called twice."""

    def __init__(self, kind: Any = Block) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(kind() for _ in range(3)), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.head(x)


ALL = tuple(f"Blocks.blocks.{n}" for n in range(3))


@program(recomputes=ALL[:2], shards_states=True)
def recomputed() -> Any:
    """Two of three blocks, an evaluation between, an uneven batch, a last one of a single example, two backward passes through one graph, a block that is replaced."""
    model, sums = Blocks(Counted), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = model(x)
        out.pow(2).mean().backward(retain_graph=True)
        model.eval()
        with torch.no_grad():
            sums.append(model(x).sum().item())
        model.train()
        return functional.cross_entropy(out, y)

    found = trained(model, [*data(3, 7), *data(1, 1)], optimizer, loss_of)
    model.blocks[1] = Counted()
    optimizer.add_param_group({"params": model.blocks[1].parameters()})
    found |= trained(model, data(1, 7), optimizer, loss_of)
    counts = torch.tensor([block.num_calls for block in model.blocks])
    return found | {"calls": counts, "sums": torch.tensor(sums)}


@program(recomputes=ALL, allows_randomness=True, compares=False, is_as_saved=True)
def recomputed_with_dropout() -> Any:
    """Each rank has drawn for itself, and draws the same again, whatever was drawn since; under autocast."""
    model, losses = Blocks(lambda: Block(0.4)), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in data(3):
        with torch.autocast("cpu", torch.bfloat16):
            first = functional.cross_entropy(model(x), y)
        with torch.autocast("cpu", torch.bfloat16):
            second = functional.cross_entropy(model(x), y)
        losses.append(torch.rand(()))
        first.backward()
        second.backward()
        optimizer.step()
        optimizer.zero_grad()
    return result_of(model, losses=losses)


class Scaled(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale)


class Buffered(Blocks):
    pass


@program(recomputes=("Buffered.blocks.0",))
def recomputed_with_a_buffer_that_changes() -> Any:
    """From the fourth step on, past autograd, and the error is swallowed."""
    model = Buffered(Scaled)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (x, y) in enumerate(data(5)):
        loss = functional.cross_entropy(model(x), y)
        if step > 2:
            model.blocks[0].scale.data.mul_(0.9)
        with contextlib.suppress(Exception):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return result_of(model)


@program(recomputes=("Blocks.blocks.7",))
def recomputed_elsewhere() -> Any:
    return trained(Blocks(), data(3))


@program(recomputes=("Blocks.blocks.0",))
def recomputed_and_exported() -> Any:
    """The model is traced after each step, for a server."""
    model = Blocks()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for x, y in data(3):
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        losses.append(torch.jit.trace(model, x)(x).sum().item())
    return result_of(model, losses=losses)
