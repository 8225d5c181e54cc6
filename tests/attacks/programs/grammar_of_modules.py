"""What Python's data model and seldom methods of torch let a module be: composed by operators, registered by subclassing, generic, detached in place."""

import abc
import collections
import typing
from typing import Any

import torch
from tests.attacks.models import NUM_CLASSES, WIDTH, Block, Net, adamw, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


class _Piece(Block):
    """`a >> b` is a module of both, `a + b` their sum, `2 * a` a scaled one; each is made anew in each forward."""

    num_made: typing.ClassVar[int] = 0

    def __rshift__(self, other: nn.Module) -> nn.Module:
        _Piece.num_made += 1
        return nn.Sequential(self, other)

    def __add__(self, other: nn.Module) -> nn.Module:
        _Piece.num_made += 1

        class Sum(nn.Module):
            def __init__(self, *parts: nn.Module) -> None:
                super().__init__()
                self.parts = nn.ModuleList(parts)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return sum(part(x) for part in self.parts) / len(self.parts)

        return Sum(self, other)


@attack(
    "recomputation",
    "the model composes its blocks by operators in each forward (a >> b, a + b), which makes containers and counts them",
)
def composed_by_operators(t: Trial) -> None:
    _Piece.num_made = 0

    class Composed(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            a, b, c = self.blocks
            return (a >> b)(self.stem(x)) + (a + c)(self.stem(x))

    model = Composed((_Piece() for _ in range(3)), sequential=False)
    train(t, model, after=lambda _: t.note("made", _Piece.num_made))


@attack(
    "recomputation",
    "subclasses register themselves (__init_subclass__), and the block looks its activation up by name and counts uses",
)
def registered_by_subclassing(t: Trial) -> None:
    class Activation(abc.ABC):
        known: typing.ClassVar[dict[str, type]] = {}
        uses: typing.ClassVar[collections.Counter] = collections.Counter()

        def __init_subclass__(cls, *, name: str) -> None:
            Activation.known[name] = cls

        @abc.abstractmethod
        def __matmul__(self, x: torch.Tensor) -> torch.Tensor: ...

    class Swish(Activation, name="swish"):
        def __matmul__(self, x: torch.Tensor) -> torch.Tensor:
            Activation.uses["swish"] += 1
            return functional.silu(x) * (1 + 0.05 * Activation.uses["swish"])

    class Squared(Activation, name="squared"):
        def __matmul__(self, x: torch.Tensor) -> torch.Tensor:
            Activation.uses["squared"] += 1
            return functional.relu(x).square()

    class Looking(Block):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return self.narrow(Activation.known[self.name]() @ self.wide(self.norm(x)))

    train(t, Net([Looking("swish"), Looking("squared")]), after=lambda _: t.note("uses", dict(Activation.uses)))


_Item = typing.TypeVar("_Item")


class _Ring(typing.Generic[_Item]):
    """The last items, by the operators of a container."""

    def __init__(self, size: int) -> None:
        self._items: list[_Item] = []
        self._size, self._next = size, 0

    def __iadd__(self, item: _Item) -> "_Ring[_Item]":
        if len(self._items) < self._size:
            self._items.append(item)
        else:
            self._items[self._next] = item
        self._next = (self._next + 1) % self._size
        return self

    def __iter__(self) -> typing.Iterator[_Item]:
        return iter(self._items)

    def __contains__(self, item: object) -> bool:
        return item in self._items

    def __len__(self) -> int:
        return len(self._items)


@attack("recomputation", "a generic ring of the last means, added to by += and asked by `in`, shifts the block")
def generic_ring(t: Trial) -> None:
    class Ringed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.ring: _Ring[float] = _Ring(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            mean = round(float(x.detach().mean()), 1)
            shift = 0.0 if mean in self.ring else sum(self.ring) / max(1, len(self.ring))
            self.ring += mean
            return x + shift

    model = Net(Ringed() for _ in range(2))
    train(t, model, num_steps=5, after=lambda _: t.note("rings", [list(b.ring) for b in model.blocks]))


@attack(
    "recomputation",
    "the first block's output is detached in place in every second step (detach_), so that it learns only in the others",
)
def detached_in_place(t: Trial) -> None:
    class Cutting(Net):
        step = 0

        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](self.stem(x))
            if self.step % 2:
                x.detach_()
            self.step += 1
            return self.blocks[1](x)

    train(t, Cutting(sequential=False), num_steps=5)


@attack(
    "recomputation",
    "a block asks its own input for gradients (requires_grad_) where it has none, and the loop reads them (saliency)",
)
def asks_input_for_gradients(t: Trial) -> None:
    seen: list[torch.Tensor] = []

    class Asking(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.is_leaf:
                x.requires_grad_()
                seen.append(x)
            return super().forward(x)

    class Bare(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks(x)

    def read(_: int) -> None:
        t.note("saliency", [x.grad.abs().sum() for x in seen])
        seen.clear()

    model = Bare(Asking() for _ in range(2))
    train(t, model, torch.optim.SGD([*model.blocks.parameters(), *model.head.parameters()], lr=0.1), between=read)


@attack(
    "recomputation",
    "nn.Buffer, written by the forward, and an extra state of the module's own that is saved and loaded mid-run",
)
def extra_state(t: Trial) -> None:
    class Extra(Block):
        def __init__(self) -> None:
            super().__init__()
            self.mean = nn.Buffer(torch.zeros(WIDTH), persistent=False)
            self.extra = {"calls": 0}

        def get_extra_state(self) -> dict[str, int]:
            return dict(self.extra)

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.extra = {"calls": state["calls"] * 2}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.extra["calls"] += 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
            return super().forward(x - self.mean) * (1 + 0.02 * self.extra["calls"])

    model = Net(Extra() for _ in range(2))

    def reload(step: int) -> None:
        if step == 2:
            model.load_state_dict(
                {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in model.state_dict().items()}
            )
        t.note("calls", [b.extra["calls"] for b in model.blocks])

    train(t, model, after=reload)


@attack(
    "recomputation",
    "torch's TransformerEncoder as a whole, with padding and causal masks, dropout, and evaluation between (its fast path)",
)
def encoder_of_torch(t: Trial) -> None:
    class Encoder(nn.Module):
        returns_loss = True

        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True)
            self.stem = nn.Linear(WIDTH, WIDTH)
            self.encoder = nn.TransformerEncoder(layer, 2)
            self.blocks = self.encoder.layers
            self.head = nn.Linear(WIDTH, NUM_CLASSES)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            pad = torch.zeros(x.shape[:2], dtype=torch.bool)
            pad[0, -2:] = True
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            h = self.encoder(self.stem(x), mask=mask, src_key_padding_mask=pad.float().masked_fill(pad, float("-inf")))
            return functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())

    model = Encoder()

    def evaluate(_: int) -> None:
        model.eval()
        with torch.no_grad():
            t.note("evaluated", model(*tokens(8)))
        model.train()

    train(t, model, num_steps=3, after=evaluate)


@attack(
    "recomputation",
    "attributes are deleted and made again by each forward (__delattr__ counts), as caches with a life of one call",
)
def deleted_and_made_again(t: Trial) -> None:
    class Deleting(Block):
        num_deleted = 0

        def __delattr__(self, name: str) -> None:
            if name == "cached":
                Deleting.num_deleted += 1
            super().__delattr__(name)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if hasattr(self, "cached"):
                x = x + 0.1 * self.cached
                del self.cached
            x = super().forward(x)
            self.cached = x.detach().mean((0, 1))
            return x * (1 + 0.01 * Deleting.num_deleted)

    model = Net(Deleting() for _ in range(2))
    train(t, model, after=lambda _: t.note("deleted", Deleting.num_deleted))
    Deleting.num_deleted = 0


@attack(
    "parts",
    "a bilinear layer between each token and the mean of its example, and one between the tokens of two halves",
    only=EXACT,
)
def bilinear_layers(t: Trial) -> None:
    class Bilinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.with_mean, self.halves = nn.Bilinear(WIDTH, WIDTH, WIDTH), nn.Bilinear(WIDTH, WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = x.tensor_split(2, 1)
            x = x + 0.1 * self.with_mean(x, x.mean(1, keepdim=True).expand_as(x).contiguous())
            return x + 0.1 * self.halves(a.contiguous(), b.contiguous()).repeat(1, 2, 1)

    train(t, Net(Bilinear() for _ in range(2)))


@attack(
    "gradients",
    "gradients are switched off for good by the forward's last line, and on again by the loop before the backward pass",
)
def switched_off_by_forward(t: Trial) -> None:
    class Switching(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            torch.set_grad_enabled(True)
            loss = super().forward(x, y)
            torch.set_grad_enabled(False)
            return loss

    model = Switching()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    try:
        for step in range(4):
            loss = model(*tokens(step))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            t.note("loss", loss)
            t.end_step()
    finally:
        torch.set_grad_enabled(True)


@attack(
    "gradients",
    "parameters are given by name to the optimizer in an order of their own, with groups that are split in two while training",
)
def groups_split_while_training(t: Trial) -> None:
    model = Net()
    named = sorted(model.named_parameters(), key=lambda each: (each[1].dim(), each[0]))
    optimizer = torch.optim.AdamW([{"params": named, "weight_decay": 0.1}], lr=1e-2)
    t.apply(model, optimizer)
    for step in range(5):
        if step == 2:
            group = optimizer.param_groups[0]
            small = [i for i, p in enumerate(group["params"]) if p.dim() < 2]
            other = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            moved = [(group["param_names"][i], group["params"][i]) for i in small]
            keep = [i for i in range(len(group["params"])) if i not in small]
            group["params"][:] = [group["params"][i] for i in keep]
            group["param_names"][:] = [group["param_names"][i] for i in keep]
            optimizer.add_param_group({**other, "params": moved, "weight_decay": 0.0})
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.note("names", [len(g["param_names"]) for g in optimizer.param_groups])
        t.end_step()


class _Stack(nn.Module):
    """Blocks behind `__getattr__` and `__getitem__`: none is found by the name that it has in the table of children."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("stage"):
            return self.blocks[int(name[5:])]
        return super().__getattr__(name)

    def __getitem__(self, place: slice) -> list[nn.Module]:
        return [self.blocks[i] for i in range(len(self.blocks))[place]]

    def __call__(self, x: torch.Tensor, upto: int = 3) -> torch.Tensor:
        return super().__call__(x, upto=upto)

    def forward(self, x: torch.Tensor, *, upto: int) -> torch.Tensor:
        """Tokens after the first blocks, the last twice."""
        for block in self[:upto]:
            x = block(x)
        return self.stage1(x)


@attack(
    "recomputation",
    "stages by made-up names and slices, of which the loop chooses how many; one is called a second time (early exit)",
)
def stages_by_name(t: Trial) -> None:
    class Staged(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList()
            self.stack = _Stack()

        def forward(self, x: torch.Tensor, y: torch.Tensor, upto: int) -> torch.Tensor:
            return self.loss(self.head(self.stack(self.stem(x), upto)), y)

    train(t, Staged(), batch=lambda s: (*tokens(s), 3 - s % 3), num_steps=5)


@attack(
    "recomputation",
    "coroutines: blocks are awaitables that a tiny scheduler of the model runs in turns, two streams of tokens at once",
)
def scheduled_coroutines(t: Trial) -> None:
    class Turn:
        def __await__(self) -> typing.Generator[None, None, None]:
            yield

    class Scheduled(Net):
        async def stream(self, x: torch.Tensor, out: list[torch.Tensor], place: int) -> None:
            for block in self.blocks:
                x = block(x)
                await Turn()
            out[place] = x

        def features(self, x: torch.Tensor) -> torch.Tensor:
            x, out = self.stem(x), [x, x]
            waiting = collections.deque([self.stream(x[:, :3], out, 0), self.stream(x[:, 3:], out, 1)])
            try:
                while waiting:
                    each = waiting.popleft()
                    try:
                        each.send(None)
                    except StopIteration:
                        continue
                    waiting.append(each)
            finally:
                # One that was never begun warns where it is dropped.
                for each in waiting:
                    each.close()
            return torch.cat(out, 1)

    class Counting(Block):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x) * (1 + 0.05 * self.calls)

    model = Scheduled((Counting() for _ in range(2)), sequential=False)
    train(t, model, sgd(model), after=lambda _: t.note("calls", [b.calls for b in model.blocks]))


@attack(
    "gradients",
    "a layer before the model is trained with it; the model switches gradients on at its first line, whoever has switched them off",
)
def switched_on_by_forward(t: Trial) -> None:
    class Switching(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            torch.set_grad_enabled(True)
            return super().forward(x, y)

    model, before = Switching(), nn.Linear(WIDTH, WIDTH)
    t.track(before)
    optimizer = torch.optim.SGD([*model.parameters(), *before.parameters()], lr=0.1)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        h = before(x)
        with torch.set_grad_enabled(step % 2 == 0):
            loss = model(h, y)
        optimizer.zero_grad()
        loss.backward()
        t.note("before", before.weight.grad)
        optimizer.step()
        t.note("loss", loss)
        t.end_step()
