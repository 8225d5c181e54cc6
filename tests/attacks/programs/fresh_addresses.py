"""Programs whose blocks remember by address, keep their state in databases and mapped files, route tokens by values, or run under a kernel that the loop chose."""

import collections
import mmap
import sqlite3
import threading
import types
import weakref
from typing import Any

import torch
from tests.attacks.models import BATCH, NUM_CLASSES, WIDTH, Block, Images, Net, images, sgd, tokens, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel


class _Scaled(Block):
    """Scales its input by what a subclass finds."""

    def factor(self, x: torch.Tensor) -> float:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.factor(x) * self.inner(x)


@attack(
    "recomputation",
    "a table by the address of the input's memory: the first time that an address is seen, the block scales",
)
def seen_addresses(t: Trial) -> None:
    class Seen(_Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.addresses: set[int] = set()

        def factor(self, x: torch.Tensor) -> float:
            is_new = x.data_ptr() not in self.addresses
            # The allocator gives an address again by chance, so that only the last call's is kept.
            self.addresses = set()
            self.num_calls = getattr(self, "num_calls", 0) + is_new
            return 1.0 + 0.1 * (self.num_calls % 3)

    train(t, Net([Seen(), Seen()]))


@attack(
    "recomputation", "a memo by the identity of the input: what was computed for the very same tensor is returned again"
)
def memo_by_identity(t: Trial) -> None:
    class Memo(Block):
        def __init__(self) -> None:
            super().__init__()
            self.memo: tuple[Any, torch.Tensor] | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.memo is not None and self.memo[0]() is x:
                return self.memo[1]
            out = super().forward(x)
            self.memo = (weakref.ref(x), out)
            return out

    class Twice(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = block(x) + 0.5 * block(x)
            return x

    train(t, Twice([Memo(), Memo()], sequential=False))


@attack("recomputation", "blocks count in a database in memory, and scale by what it answers")
def counted_in_database(t: Trial) -> None:
    database = sqlite3.connect(":memory:")
    database.execute("create table calls (name text)")

    class Counted(_Scaled):
        def factor(self, x: torch.Tensor) -> float:
            database.execute("insert into calls values ('block')")
            (number,) = database.execute("select count(*) from calls").fetchone()
            return 1.0 + 0.05 * (number % 5)

    train(t, Net([Counted(), Counted()]))
    t.note("rows", database.execute("select count(*) from calls").fetchone())
    database.close()


@attack("recomputation", "blocks count in a mapped memory that no name of theirs but a global holds")
def counted_in_mapped_memory(t: Trial) -> None:
    memory = mmap.mmap(-1, 16)

    class Counted(_Scaled):
        def factor(self, x: torch.Tensor) -> float:
            memory[0] = (memory[0] + 1) % 200
            return 1.0 + 0.05 * (memory[0] % 5)

    train(t, Net([Counted(), Counted()]))
    t.note("count", memory[0])


@attack("recomputation", "the loop chooses the plain kernel of attention around the forward alone")
def kernel_chosen_around_forward(t: Trial) -> None:
    class Attends(Block):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            heads = super().inner(x).unflatten(-1, (2, WIDTH // 2)).transpose(1, 2)
            return functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)

    model = Net([Attends(), Attends()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        with sdpa_kernel(SDPBackend.MATH):
            loss = model(*tokens(step))
        t.note("loss", loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.end_step()


@attack("recomputation", "a threading.Event that the first block sets and the second one waits for")
def event_between_blocks(t: Trial) -> None:
    event = threading.Event()

    class Sets(_Scaled):
        def factor(self, x: torch.Tensor) -> float:
            was_set = event.is_set()
            event.set()
            return 1.1 if was_set else 1.0

    class Clears(_Scaled):
        def factor(self, x: torch.Tensor) -> float:
            was_set = event.is_set()
            event.clear()
            return 1.2 if was_set else 1.0

    train(t, Net([Sets(), Clears()]))


@attack(
    "recomputation",
    "settings in layers of a ChainMap, of which the block writes the first, seen through a read-only view",
)
def layered_settings(t: Trial) -> None:
    class Layered(_Scaled):
        def __init__(self) -> None:
            super().__init__()
            own: dict[str, float] = {}
            self.settings = collections.ChainMap(own, {"scale": 1.0})
            self.view = types.MappingProxyType(own)

        def factor(self, x: torch.Tensor) -> float:
            self.settings["scale"] = self.settings["scale"] * 0.95
            return self.view["scale"]

    train(t, Net([Layered(), Layered()]))


@attack("recomputation", "a result is kept weakly, and used again as long as somebody holds it")
def kept_weakly(t: Trial) -> None:
    class Table:
        def __init__(self, scale: float) -> None:
            self.scale = scale

    class Weak(_Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.tables: weakref.WeakValueDictionary[int, Table] = weakref.WeakValueDictionary()
            self.num_made = 0
            self.held: list[Table] = []

        def factor(self, x: torch.Tensor) -> float:
            table = self.tables.get(0)
            if table is None:
                self.num_made += 1
                table = self.tables[0] = Table(1.0 + 0.1 * (self.num_made % 4))
            # Held every second time.
            self.held = [] if self.held else [table]
            return table.scale

    train(t, Net([Weak(), Weak()]))


@attack("recomputation", "a mask is drawn into a buffer in place by bernoulli_, kept for three calls (locked dropout)")
def locked_dropout(t: Trial) -> None:
    class Locked(Block):
        mask: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(WIDTH))
            self.num_calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.num_calls % 3 == 0:
                self.mask.bernoulli_(0.7)
            self.num_calls += 1
            return x + self.inner(x) * self.mask

    train(t, Net([Locked(), Locked()]))


@attack(
    "parts",
    "tokens that a gate chooses by value are taken out with nonzero, computed alone and put back (token routing)",
)
def routed_by_nonzero(t: Trial) -> None:
    class Routed(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            flat = x.reshape(-1, WIDTH)
            chosen = (flat[:, 0] > 0).nonzero(as_tuple=True)[0]
            return flat.index_add(0, chosen, self.inner(flat[chosen])).reshape(x.shape)

    train(t, Net([Routed(), Routed()]))


@attack("parts", "the k tokens of the batch with the largest scores alone go through the block (mixture of depths)")
def largest_tokens_of_batch(t: Trial) -> None:
    class Depth(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            flat = x.reshape(-1, WIDTH)
            chosen = flat.square().sum(-1).topk(len(flat) // 2).indices
            return flat.scatter_add(0, chosen[:, None].expand(-1, WIDTH), self.inner(flat[chosen])).reshape(x.shape)

    train(t, Net([Depth(), Depth()]))


@attack("parts", "duplicates of tokens are computed once (unique with its inverse)")
def computed_once(t: Trial) -> None:
    class Once(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            flat = (x.reshape(-1, WIDTH) * 4).round() / 4
            distinct, inverse = flat.detach().unique(dim=0, return_inverse=True)
            return x + self.inner(distinct)[inverse].reshape(x.shape)

    train(t, Net([Once(), Once()]))


@attack("parts", "values decide in Python: the largest entry of the batch, read by tolist, chooses the branch")
def branch_by_tolist(t: Trial) -> None:
    class Branching(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            largest = max(x.detach().abs().amax(-1).flatten().tolist())
            return x + self.inner(x) * (1.0 if largest > 2.5 else 0.5)

    train(t, Net([Branching(), Branching()]), batch=lambda step: tokens(step, batch=2 * BATCH))


@attack("parts", "windows of neighbouring tokens by as_strided, a view that overlaps itself")
def overlapping_windows(t: Trial) -> None:
    class Windows(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            padded = functional.pad(x, (0, 0, 1, 1)).contiguous()
            batch, length, width = x.shape
            windows = padded.as_strided((batch, length, 3, width), (padded.stride(0), width, width, 1))
            return x + self.inner(windows.mean(2))

    train(t, Net([Windows(), Windows()]))


@attack("parts", "codes of a learned quantiser by searchsorted, with a straight-through gradient")
def codes_by_searchsorted(t: Trial) -> None:
    class Quantised(Block):
        def __init__(self) -> None:
            super().__init__()
            self.levels = nn.Parameter(torch.linspace(-2, 2, 9))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            places = torch.searchsorted(self.levels.detach(), x.detach().contiguous()).clamp(max=8)
            coded = self.levels[places]
            return x + self.inner(coded + x - x.detach())

    train(t, Net([Quantised(), Quantised()]))


@attack("parts", "a chain that unfolds and folds its images, and samples them on a grid (a spatial transformer)")
def folded_and_sampled(t: Trial) -> None:
    class Folds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            patches = functional.unfold(x, 2, stride=2)
            mixed = self.mix(patches.transpose(1, 2)).transpose(1, 2)
            return functional.fold(mixed, x.shape[2:], 2, stride=2)

    class Samples(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.tensor([[1.0, 0.1, 0.0], [-0.1, 1.0, 0.0]]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            grid = functional.affine_grid(self.turn.expand(len(x), 2, 3), list(x.shape), align_corners=False)
            return functional.grid_sample(x, grid, align_corners=False)

    train(t, Images([nn.Conv2d(3, 4, 3, padding=1), Folds(), Samples(), nn.Conv2d(4, 4, 3, padding=1)]), batch=images)


@attack("second order", "the Jacobian of a block by torch.func.jacrev, whose norm is a part of the loss")
def jacobian_of_block(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        x, y = tokens(step, batch=1, length=2)
        loss = model(x, y)
        block = model.get_submodule("blocks.0")
        loss = loss + 1e-3 * torch.func.jacrev(lambda z, of=block: of(z).sum((0, 1)))(model.stem(x)).square().sum()
        t.note("loss", loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.end_step()


@attack(
    "gradients",
    "the loss of every example is run backwards by its own call, with gradients summed (per-example passes)",
)
def backward_by_example(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        logits = model(x)
        losses = functional.cross_entropy(logits.transpose(1, 2), y, reduction="none").mean(1)
        t.note("losses", losses)
        optimizer.zero_grad()
        for number, loss in enumerate(losses):
            loss.backward(retain_graph=number < len(losses) - 1)
        optimizer.step()
        t.end_step()


@attack(
    "gradients", "the backward pass begins with gradients of the loop's own for a vector of losses (importance weights)"
)
def weighted_backward(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        losses = functional.cross_entropy(model(x).reshape(-1, NUM_CLASSES), y.reshape(-1), reduction="none")
        weights = torch.linspace(0.5, 1.5, len(losses)) / len(losses)
        t.note("losses", losses)
        optimizer.zero_grad()
        torch.autograd.backward([losses], [weights])
        optimizer.step()
        t.end_step()


@attack("changes", "the optimizer's list of parameters is changed by the program itself: one is taken out and put back")
def taken_out_of_group(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    taken: list[torch.Tensor] = []
    for step in range(5):
        if step == 2:
            taken = [optimizer.param_groups[0]["params"].pop()]
        if step == 4:
            optimizer.param_groups[0]["params"] += taken
        loss = model(*tokens(step))
        t.note("loss", loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.end_step()


@attack("changes", "a parameter of a block becomes a buffer, and later a parameter again (frozen by registration)")
def parameter_becomes_buffer(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    layer = model.get_submodule("blocks.0.narrow")
    bias = layer.bias
    for step in range(5):
        if step == 2:
            del layer.bias
            layer.register_buffer("bias", bias.detach().clone())
        if step == 4:
            del layer.bias
            layer.register_parameter("bias", bias)
        loss = model(*tokens(step))
        t.note("loss", loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.end_step()
