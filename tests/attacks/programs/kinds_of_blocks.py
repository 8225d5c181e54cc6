"""Blocks of kinds that are seldom tried: scripted parts with a state, sparse and jagged tensors, higher-order operators, counted classes and modules of helpers."""

import types
from typing import Any

import torch
from tests.attacks.models import WIDTH, Block, Net, adamw, sgd, tokens, train
from tests.attacks.places import BITWISE, EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional

_BEGINS = 15


class _ScriptedState(nn.Module):
    calls: int

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("total", torch.zeros(WIDTH))
        self.mean = torch.zeros(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(dim=[0, 1])
        if self.calls > 8:
            return x + 0.1 * self.mean
        return x


class _ScriptedBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + 0.01 * torch.relu(self.calls - 8) * torch.arange(x.shape[-1])


@attack(
    "recomputation", "a scripted part of each block keeps a count and a running mean as attributes, which matter later"
)
def scripted_part_with_state(t: Trial) -> None:
    class Scripted(Block):
        def __init__(self) -> None:
            super().__init__()
            self.part = torch.jit.script(_ScriptedState())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.part(x + self.inner(x))

    model = Net([Scripted(), Scripted()])
    train(t, model, num_steps=12, after=lambda _: t.note("calls", [b.part.calls for b in model.blocks]))


@attack("recomputation", "a scripted part of each block counts in a buffer, which matters later")
def scripted_part_with_buffer(t: Trial) -> None:
    class Scripted(Block):
        def __init__(self) -> None:
            super().__init__()
            self.part = torch.jit.script(_ScriptedBuffer())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.part(x + self.inner(x))

    model = Net([Scripted(), Scripted()])
    train(t, model, num_steps=12, after=lambda _: t.note("calls", [b.part.calls for b in model.blocks]))


_HELPERS: Any = types.ModuleType("tests_attacks_helpers")
_HELPERS.calls = 0


@attack("recomputation", "a count in a helper module is changed by setattr and read by getattr, and matters later")
def helper_module_by_setattr(t: Trial) -> None:
    _HELPERS.calls = 0

    class Counting(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.inner(x)
            name = "".join(("ca", "lls"))
            setattr(_HELPERS, name, getattr(_HELPERS, name) + 1)
            return x + 0.01 * max(0, getattr(_HELPERS, name) - _BEGINS) * torch.arange(WIDTH)

    train(t, Net([Counting(), Counting()]), num_steps=12)


@attack("recomputation", "a count in a helper module is changed through its __dict__, and matters later")
def helper_module_by_dict(t: Trial) -> None:
    _HELPERS.calls = 0

    class Counting(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.inner(x)
            vars(_HELPERS)["calls"] += 1
            return x + 0.01 * max(0, _HELPERS.__dict__["calls"] - _BEGINS) * torch.arange(WIDTH)

    train(t, Net([Counting(), Counting()]), num_steps=12)


class _Registry(nn.Module):
    """No block has one inside."""

    calls = 0


@attack(
    "recomputation", "a count on a class of modules that no block has inside is raised by its name, and matters later"
)
def counted_on_class_of_modules(t: Trial) -> None:
    _Registry.calls = 0

    class Counting(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.inner(x)
            _Registry.calls += 1
            return x + 0.01 * max(0, _Registry.calls - _BEGINS) * torch.arange(WIDTH)

    train(t, Net([Counting(), Counting()]), num_steps=12)


@attack("recomputation", "a count on torch's own class of linear layers is raised by its name, and matters later")
def counted_on_torchs_class(t: Trial) -> None:
    nn.Linear.calls = 0  # type: ignore[attr-defined]

    class Counting(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.inner(x)
            nn.Linear.calls += 1  # type: ignore[attr-defined]
            return x + 0.01 * max(0, nn.Linear.calls - _BEGINS) * torch.arange(WIDTH)  # type: ignore[attr-defined]

    try:
        train(t, Net([Counting(), Counting()]), num_steps=12)
    finally:
        del nn.Linear.calls  # type: ignore[attr-defined]


@attack(
    "recomputation",
    "figures go to a stack of aggregators of a library of the script's (fairseq's metrics), whose counts matter later",
)
def stack_of_aggregators(t: Trial) -> None:
    active: dict[str, dict[str, float]] = {"default": {}}
    stack = ["default"]

    def log(name: str, value: float) -> float:
        for aggregator in stack:
            held = active[aggregator]
            held[name] = held.get(name, 0.0) + value
        return active[stack[-1]][name]

    class Logging(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.inner(x)
            calls = log("calls", 1)
            return x + 0.01 * max(0, calls - _BEGINS) * torch.arange(WIDTH)

    def begin(step: int) -> None:
        if step == 9:
            active["late"] = {}
            stack.append("late")

    train(t, Net([Logging(), Logging()]), num_steps=12, before=begin, after=lambda _: t.note("held", active))


@attack(
    "recomputation", "an adjacency matrix in compressed rows multiplies tokens in each block (a graph net)", only=EXACT
)
def compressed_rows(t: Trial) -> None:
    near = (torch.eye(6).roll(1, 0) + torch.eye(6)).to_sparse_csr()

    class Graph(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mixed = torch.stack([near @ each for each in x])
            return x + self.inner(mixed)

    train(t, Net([Graph(), Graph()]), num_steps=4)


@attack(
    "recomputation", "jagged tensors go through linear layers and norms of blocks (nested, layout jagged)", only=BITWISE
)
def jagged_blocks(t: Trial) -> None:
    class Ragged(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            ragged = torch.nested.as_nested_tensor([x[0], x[1, :4], x[2, :5], x[3]], layout=torch.jagged)
            for block in self.blocks:
                ragged = block(ragged)
            padded = ragged.to_padded_tensor(0.0)
            return functional.pad(padded, (0, 0, 0, x.shape[1] - padded.shape[1]))

    train(t, Ragged(), num_steps=4)


@attack(
    "recomputation",
    "autocast to bfloat16 begins in the fourth step, and its type changes to float16 in the sixth, gradients scaled by hand",
    only=BITWISE,
)
def autocast_begins_later(t: Trial) -> None:
    model = Net().float()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(8):
        x, y = tokens(step)
        kind = torch.float16 if step > 5 else torch.bfloat16
        with torch.autocast("cpu", dtype=kind, enabled=step > 2):
            loss = model(x.float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


class _Activated(torch.autograd.Function):
    """An activation in place whose input is found again from its output, in the output's memory (in-place activated batch norm)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = functional.leaky_relu(x, 0.5)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (out,) = ctx.saved_tensors
        with torch.no_grad():
            # Nobody else has saved it.
            found = torch.where(out.data > 0, out.data, out.data / 0.5)
            out.data.copy_(found)
        return torch.where(out.data > 0, grad, 0.5 * grad)


@attack(
    "recomputation",
    "the backward pass of an activation finds its input again in the memory of its saved output (InPlace-ABN)",
    only=EXACT,
)
def input_found_in_place(t: Trial) -> None:
    class InPlace(Block):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return self.narrow(_Activated.apply(self.wide(self.norm(x))) * 1.0)

    train(t, Net([InPlace(), InPlace()]), num_steps=5)


@attack(
    "recomputation",
    "features of attention are drawn anew in every fourth call, which a buffer counts (Performer)",
    only=EXACT,
)
def features_drawn_anew(t: Trial) -> None:
    class Performer(Block):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.register_buffer("projection", torch.randn(WIDTH, 5))
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                if int(self.calls) >= 4:
                    self.projection.copy_(torch.randn_like(self.projection))
                    self.calls.zero_()
                self.calls += 1
            query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
            query, key = ((part @ self.projection).softmax(-1) for part in (query, key))
            return x + self.out(query @ (key.transpose(1, 2) @ value))

    train(t, Net([Performer(), Performer()]), num_steps=11)


@attack(
    "recomputation",
    "slots are drawn around a learned mean and refined by a recurrent cell, three times in each block (slot attention)",
)
def slots_refined(t: Trial) -> None:
    class Slots(Block):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.spread = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
            self.cell = nn.GRUCell(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            slots = self.mean + self.spread.exp() * torch.randn(len(x), 3, WIDTH)
            for _ in range(3):
                weights = (slots @ x.transpose(1, 2)).softmax(1) + 1e-8
                updates = (weights / weights.sum(-1, keepdim=True)) @ x
                slots = self.cell(updates.flatten(0, 1), slots.flatten(0, 1)).view_as(slots)
            return x + self.inner(x) + slots.mean(1, keepdim=True)

    train(t, Net([Slots(), Slots()]), num_steps=4)


@attack(
    "recomputation",
    "weights are drawn anew in each forward around learned means, their divergence left on the layers (Bayes by backprop)",
)
def weights_drawn(t: Trial) -> None:
    class Drawn(nn.Linear):
        def __init__(self, inside: int, outside: int) -> None:
            super().__init__(inside, outside)
            self.rho = nn.Parameter(torch.full_like(self.weight, -4))
            self.divergence: Any = 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            spread = functional.softplus(self.rho)
            self.divergence = (0.5 * (self.weight.square() + spread.square()) - spread.log()).sum()
            return functional.linear(x, self.weight + spread * torch.randn_like(spread), self.bias)

    model = Net()
    for block in model.blocks:
        block.wide, block.narrow = Drawn(WIDTH, 2 * WIDTH), Drawn(2 * WIDTH, WIDTH)
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        loss = loss + 1e-4 * sum(m.divergence for m in model.modules() if isinstance(m, Drawn))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "recomputation",
    "steps of an adaptive solver inside of a block, how many depends on the error; a counter of evaluations goes on",
)
def adaptive_solver(t: Trial) -> None:
    class Solver(Block):
        evaluations = 0

        def slope(self, x: torch.Tensor) -> torch.Tensor:
            self.evaluations += 1
            return torch.tanh(self.inner(x))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time, width = 0.0, 0.5
            while time < 1:
                width = min(width, 1 - time)
                first = self.slope(x)
                second = self.slope(x + width * first)
                error = float((second - first).detach().abs().max()) * width
                if error < 0.3 or width < 0.1:
                    x = x + 0.5 * width * (first + second)
                    time += width
                width *= 0.9 if error > 0.2 else 1.5
            return x

    model = Net([Solver(), Solver()])
    train(t, model, num_steps=4, after=lambda _: t.note("evaluations", [b.evaluations for b in model.blocks]))


class _Graph(Block):
    """A block with a trained adjacency in compressed rows, and a buffer of another in coordinates."""

    def __init__(self) -> None:
        super().__init__()
        near = torch.eye(WIDTH) + torch.eye(WIDTH).roll(1, 0)
        self.near = nn.Parameter(near.to_sparse_csr())
        self.register_buffer("far", torch.eye(WIDTH).roll(3, 0).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        columns = x.reshape(-1, WIDTH).t()
        mixed = torch.sparse.mm(self.near, columns) + torch.sparse.mm(self.far, columns)
        return x + self.inner(x) + 0.1 * mixed.t().reshape(x.shape)


@attack("parts", "sparse tensors of blocks: trained in compressed rows, and a buffer in coordinates", only=EXACT)
def sparse_parts(t: Trial) -> None:
    model = Net([_Graph(), Block(), _Graph()])
    train(t, model, sgd(model, momentum=0.0))
