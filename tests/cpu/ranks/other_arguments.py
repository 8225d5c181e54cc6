"""Arguments and results of other kinds, random numbers that all examples share, and numbers that depend on how many examples there are."""

import dataclasses
import os
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tests.cpu.ranks.programs import data, mlp, program, result_of, trained
from torch import nn
from torch.nn import functional

WIDTH, CLASSES = 6, 4


class _Net(nn.Module):
    """Runs `changed(net, *arguments)`."""

    def __init__(self, changed: Callable[..., Any]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, CLASSES))
        self.register_buffer("table", torch.linspace(0.5, 1.5, 20).view(10, 2))
        self.changed = [changed]

    def forward(self, *arguments: Any) -> Any:
        return self.changed[0](self, *arguments)


def _trained(changed: Callable[..., Any], given: Callable[[int, torch.Tensor], Any] | None = None, loss: Any = None) -> dict[str, Any]:  # fmt: skip
    """Six steps of a net; what comes after the rows is `given` by step and rows, and `loss` is of what the model returns and the targets."""
    model = _Net(changed)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses, generator = [], torch.Generator().manual_seed(1)
    for step, size in enumerate([6, 6, 5, 6, 4, 6]):
        rows = torch.randn(size, WIDTH, generator=generator)
        targets = torch.randint(0, CLASSES, (size,), generator=generator)
        found = model(rows) if given is None else model(rows, given(step, rows))
        total = functional.cross_entropy(found, targets) if loss is None else loss(found, targets)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        losses.append(total.item())
    drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    return {"losses": losses, "drawn": drawn, **model.state_dict()}


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    logits: torch.Tensor
    inner: types.SimpleNamespace


@program()
def returns_a_dataclass() -> dict[str, Any]:
    """With a namespace in it."""
    return _trained(
        lambda model, x: _Found(model.net(x), types.SimpleNamespace(hidden=model.net[0](x), kind="text")),
        loss=lambda found, y: functional.cross_entropy(found.logits, y) + found.inner.hidden.pow(2).mean(),
    )


@dataclasses.dataclass(frozen=True)
class Batch:
    """What a loader collates, with what a model notes."""

    x: torch.Tensor
    y: torch.Tensor
    name: str
    seen: list[Any]
    found: Any = None


class TakesDataclass(nn.Module):
    """Is called with one argument, and marks it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, batch: Batch) -> torch.Tensor:
        object.__setattr__(batch, "name", None)
        return functional.cross_entropy(self.inner(batch.x), batch.y)


@program()
def batch_that_is_a_dataclass() -> dict[str, Any]:
    model, names = TakesDataclass(), []

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        batch = Batch(x, y, "first", [])
        loss = model(batch)
        names.append(batch.name is None)
        return loss

    found = trained(model, data(4), None, loss_of)
    assert all(names)
    return found


@program()
def an_agent_acts_before_it_is_trained() -> dict[str, Any]:
    """Its turns are calls with one example each, and with gradients."""
    model = mlp()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        seen, turns = torch.randn(8), []
        for _ in range(5):
            action = model(seen[None]).detach().argmax()
            turns.append((seen, action))
            seen = seen * 0.9 + action * 0.1 + torch.randn(8) * 0.1
        loss = functional.cross_entropy(model(torch.stack([x for x, _ in turns])), torch.stack([y for _, y in turns]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return result_of(model, losses=losses)


@program()
def mask_of_tokens_by_tokens() -> dict[str, Any]:
    """A (T, T) argument beside rows of examples, where T is the number of examples in the first step and not in others."""
    return _attended([4, 6, 4])


@program()
def mask_of_as_many_tokens_later() -> dict[str, Any]:
    """The other way round."""
    return _attended([6, 4])


def _attended(lengths: list[int]) -> dict[str, Any]:
    model = _Net(lambda model, x, mask: model.net(functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(1)
    for length in lengths * 2:
        rows = torch.randn(4, length, WIDTH, generator=generator)
        loss = model(rows, torch.ones(length, length).tril().bool()).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.state_dict()


@program()
def list_of_as_many_numbers() -> dict[str, Any]:
    """Weights of six scales, with a batch of six."""
    return _trained(
        lambda model, x, scales: sum(scale * model.net(x) for scale in scales),
        lambda step, _: [0.02 * step + 0.1 * number for number in range(6)],
    )


@program()
def list_of_numbers_of_the_examples() -> dict[str, Any]:
    return _trained(
        lambda model, x, scales: torch.stack([model.net(row) * scale for row, scale in zip(x, scales, strict=False)]),
        lambda _, x: [0.5 + number for number in range(len(x))],
    )


@program()
def argument_by_the_process() -> dict[str, Any]:
    """A number that is none of the batch's, and another one on each rank."""
    return _trained(lambda model, x, scale: model.net(x) * scale, lambda *_: 1 + int(os.environ["TEST_RANK"]))


def _with_layers_left_out(draw: Callable[[], Any]) -> dict[str, Any]:
    def changed(model: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            if draw() < 0.5:
                x = x + model.net[0](x).tanh()[:, :WIDTH]
        return model.net(x)

    return _trained(changed)


@program()
def layers_left_out_by_python() -> dict[str, Any]:
    return _with_layers_left_out(random.random)


@program()
def layers_left_out_by_numpy() -> dict[str, Any]:
    return _with_layers_left_out(lambda: np.random.rand(1)[0])


@program()
def layers_left_out_by_torch() -> dict[str, Any]:
    return _with_layers_left_out(lambda: torch.rand(()))


@program()
def noise_on_weights() -> dict[str, Any]:
    return _trained(lambda model, x: model.net(x) * (1 + 0.1 * torch.randn(CLASSES)))


@program()
def numbers_drawn_for_each_example() -> dict[str, Any]:
    return _trained(lambda model, x: model.net(x) * torch.tensor([[random.random()] for _ in range(len(x))]))


@program()
def mixes_by_a_drawn_number() -> dict[str, Any]:
    return _trained(lambda model, x: model.net(x.roll(1, 0) if random.random() < 0.8 else x))


@program(check_steps=0)
def sum_or_mean_by_a_drawn_number() -> dict[str, Any]:
    """By turns, so that both ways are known. Nothing is compared: the proofs have to be right."""
    turns = random.Random(3)

    def changed(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        each = functional.cross_entropy(model.net(x), y, reduction="none")
        return each.sum() if random.random() < 0.5 else each.mean()

    def given(_: int, x: torch.Tensor) -> torch.Tensor:
        random.seed(turns.randrange(100))
        return torch.arange(len(x)) % CLASSES

    return _trained(changed, given, lambda found, _: found)


@program(check_steps=0)
def element_by_the_number_of_examples() -> dict[str, Any]:
    return _trained(lambda model, x: model.net(x) * model.table[:, 0].kthvalue(len(x)).values)


@program(check_steps=0)
def last_position_of_the_examples() -> dict[str, Any]:
    return _trained(lambda model, x: model.net(x) * torch.arange(len(x))[-1])


@program()
def scratch_of_the_batch() -> dict[str, Any]:
    """Resized by `out=` to a part of the batch, which nothing takes back."""
    scratch = torch.zeros(6, WIDTH)

    def changed(model: Any, x: torch.Tensor) -> torch.Tensor:
        before = scratch.clone()
        with torch.no_grad():
            torch.mul(x, 0.5, out=scratch)
        return model.net(x + 0.1 * before)

    return _trained(changed)


def _over_tokens(divided: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], **lasts: Any) -> dict[str, Any]:
    """A loss that the model divides by a sum over other numbers of tokens in each part; `divided` is given the losses and a mask."""

    def changed(model: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        targets = torch.arange(x.shape[1]).expand(mask.shape) % CLASSES
        each = functional.cross_entropy(model.net(x[:, :, None] * x[:, None]).transpose(1, 2), targets, reduction="none")  # fmt: skip
        return divided(each, mask)

    def given(step: int, x: torch.Tensor) -> torch.Tensor:
        lengths = 1 + (torch.arange(len(x)) * (step + 1)) % WIDTH
        return (torch.arange(WIDTH) < lengths[:, None]) & (torch.arange(len(x)) < lasts.get("known", 9))[:, None]

    return _trained(changed, given, lambda found, _: found)


@program(check_steps=0)
def mean_over_tokens_within() -> dict[str, Any]:
    return _over_tokens(lambda each, mask: (each * mask).sum() / mask.sum().clamp(min=1))


@program(check_steps=0)
def mean_with_weights_that_is_added_to() -> dict[str, Any]:
    """Sums of weights of parts are that of the whole but for rounding."""
    return _over_tokens(lambda each, mask: (each * mask * 0.3).sum() / (mask * 0.3).sum().clamp(min=1e-3) + 1)


@program(check_steps=0)
def mean_over_at_least_so_many_tokens() -> dict[str, Any]:
    """More than a part has, and in some steps more than the batch has."""
    return _over_tokens(lambda each, mask: (each * mask).sum() / (mask.sum().clamp(min=20).to(each.dtype) + 0.5))


@program()
def mean_over_tokens_that_is_added_to() -> dict[str, Any]:
    return _over_tokens(lambda each, mask: (each * mask).sum() / mask.sum().clamp(min=20) + 1)


@program()
def mean_over_no_tokens_of_one_part() -> dict[str, Any]:
    return _over_tokens(lambda each, mask: (each * mask).sum() / mask.sum(), known=2)


@program(check_steps=0)
def number_of_tokens_is_written_to() -> dict[str, Any]:
    def divided(each: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        number = mask.sum().clamp(min=1)
        number.data.add_(1)
        return (each * mask).sum() / number

    return _over_tokens(divided)


@program()
def one_example_first() -> dict[str, Any]:
    """A look at the shapes, and then batches."""
    model = _Net(lambda model, x: model.net(x))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for size in (1, 6, 6, 1, 5):
        loss = model(torch.linspace(-1, 1, size * WIDTH).view(size, WIDTH)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.state_dict()


class _Forces(nn.Module):
    """Energies of examples, and the forces that they are the slopes of."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.EmbeddingBag(9, 8), nn.LayerNorm(16)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, places: torch.Tensor, kinds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = places.detach().requires_grad_()
        energies = self.last(self.norm(self.first(places + self.table(kinds)).tanh()).softmax(-1) * 9)
        (forces,) = torch.autograd.grad(energies.sum(), places, create_graph=True)
        return energies, forces


@program()
def energies_and_forces() -> Any:
    model = _Forces()
    kinds = torch.randint(0, 9, (6, 3))

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        energies, forces = model(x, kinds)
        return functional.mse_loss(energies, y[:, None].float()) + forces.square().mean()

    return trained(model, data(), loss_of=loss_of)
