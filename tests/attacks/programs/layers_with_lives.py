"""Layers that draw, remember, recurse and differentiate by themselves: burn-in, forced teachers, trees, codebooks, flows, kernels."""

import collections
import random
from collections.abc import Callable
from typing import Any

import torch
from tests.attacks.models import NUM_CLASSES, WIDTH, Block, Net, images, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.register_buffer("h", torch.zeros(4, WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All hidden states."""
        h, found = self.h, []
        for each in x.unbind(1):
            h = self.cell(each, h)
            found.append(h)
        self.h = h.detach()
        return x + torch.stack(found, 1)


@attack(
    "recomputation",
    "a recurrent net is warmed up on the first tokens without gradients, and goes on from there with them (R2D2's burn-in)",
)
def burn_in(t: Trial) -> None:
    model = Net(_Recurrent() for _ in range(2))
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        for block in model.blocks:
            block.h = torch.zeros_like(block.h)
        with torch.no_grad():
            model(x[:, :3])
        loss = model(x[:, 3:], y[:, 3:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


class _Decoder(nn.Module):
    """Words one after another, each from the true one before it or from the model's own, as Python's random says."""

    returns_loss = True

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_CLASSES, WIDTH)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, NUM_CLASSES)
        self.ratio = 1.0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss."""
        h, word, loss = self.stem(x).mean(1), torch.zeros(len(x), dtype=torch.long), x.new_zeros(())
        for i in range(y.shape[1]):
            h = self.cell(self.words(word), h)
            out = h
            for block in self.blocks:
                out = block(out)
            logits = self.head(out)
            loss = loss + functional.cross_entropy(logits, y[:, i])
            word = y[:, i] if random.random() < self.ratio else logits.argmax(-1)
        return loss / y.shape[1]


@attack(
    "recomputation",
    "a decoder is given the true word or its own by Python's random, less often the true one from step to step (teacher forcing)",
)
def teacher_forcing(t: Trial) -> None:
    model = _Decoder()

    def ratio(step: int) -> None:
        model.ratio = 1.0 - 0.25 * step

    train(t, model, before=ratio)


@attack(
    "recomputation",
    "trees of any shape: a block is called by recursion over Python tuples, leaves first, and counts nodes (Tree-LSTM)",
)
def trees_by_recursion(t: Trial) -> None:
    class Joining(Block):
        num_nodes = 0

        def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            self.num_nodes += 1
            return super().forward(left + 0.5 * right.roll(1, -1))

    class Trees(Net):
        def encode(self, tree: Any, x: torch.Tensor, depth: int = 0) -> torch.Tensor:
            if isinstance(tree, int):
                return x[:, tree]
            left, right = (self.encode(each, x, depth + 1) for each in tree)
            return self.blocks[depth % 2](left, right)

        def forward(self, x: torch.Tensor, y: torch.Tensor, tree: Any) -> torch.Tensor:
            logits = self.head(self.encode(tree, self.stem(x)))
            return functional.cross_entropy(logits, y[:, 0])

    trees = [((0, 1), (2, (3, 4))), (0, (1, (2, 3))), (((0, 1), 2), 3), (4, 5)]
    model = Trees(Joining() for _ in range(2))
    train(
        t,
        model,
        batch=lambda s: (*tokens(s), trees[s]),
        after=lambda _: t.note("nodes", [b.num_nodes for b in model.blocks]),
    )


@attack("parts", "the marginal likelihood of a Gaussian process over features of the batch, by Cholesky (deep kernel)")
def deep_kernel(t: Trial) -> None:
    class Kernel(Net):
        def __init__(self) -> None:
            super().__init__()
            self.log_scale, self.log_noise = nn.Parameter(torch.zeros(())), nn.Parameter(torch.tensor(-1.0))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            f = self.head(self.features(x)).mean(1)
            k = torch.exp(-torch.cdist(f, f).square() * self.log_scale.exp()) + self.log_noise.exp() * torch.eye(len(f))
            chol = torch.linalg.cholesky(k)
            target = y[:, :1].to(f.dtype) - 3
            a = torch.cholesky_solve(target, chol)
            return 0.5 * (target * a).sum() + chol.diagonal().log().sum()

    train(t, Kernel())


@attack(
    "recomputation",
    "augmentation inside of the model, whose strength follows the signs of the answers, kept in a buffer (ADA)",
)
def adaptive_augmentation(t: Trial) -> None:
    class Augmented(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("p", torch.tensor(0.3))
            self.signs: collections.deque = collections.deque(maxlen=4)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            flips = (torch.rand(len(x), 1, 1) < self.p).to(x.dtype)
            logits = self.head(self.features(x * (1 - 2 * flips)))
            self.signs.append(float(logits.detach()[..., 0].sign().mean()))
            if len(self.signs) == 4:
                rising = sum(self.signs) / 4 > 0.1
                self.p.copy_((self.p + (0.1 if rising else -0.1)).clamp(0, 1))
            return self.loss(logits, y)

    train(t, Augmented(), num_steps=6)


class _Codebook(nn.Module):
    """Codes by nearest neighbour, initialised by k-means on the first batch, kept as averages, restarted when unused."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(5, WIDTH))
        self.register_buffer("count", torch.ones(5))
        self.register_buffer("is_ready", torch.tensor(False))
        self.commitment = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Codes with the gradient of the input."""
        flat = x.detach().flatten(0, 1)
        if self.training and not self.is_ready:
            self.codes.copy_(flat[torch.randperm(len(flat))[:5]])
            for _ in range(2):
                near = torch.cdist(flat, self.codes).argmin(1)
                self.codes.copy_(
                    torch.stack([flat[near == i].mean(0) if (near == i).any() else self.codes[i] for i in range(5)])
                )
            self.is_ready.fill_(True)
        near = torch.cdist(flat, self.codes).argmin(1)
        if self.training:
            used = functional.one_hot(near, 5).to(flat.dtype)
            self.count.lerp_(used.sum(0), 0.2)
            self.codes.lerp_((used.T @ flat) / used.sum(0).clamp(min=1)[:, None], 0.2)
            dead = self.count < 0.9
            if dead.any():
                self.codes[dead] = flat[torch.randint(len(flat), (int(dead.sum()),))]
                self.count[dead] = 1.0
        q = self.codes[near].view_as(x)
        self.commitment = (x - q).square().mean()
        return x + (q - x).detach()


@attack(
    "recomputation",
    "codes by k-means on the first batch, averages of what they stand for, dead ones restarted, their losses on the modules",
)
def residual_codes(t: Trial) -> None:
    class Quantised(nn.Sequential):
        pass

    model = Net([Quantised(Block(), _Codebook()), Quantised(Block(), _Codebook())])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step)) + 0.25 * sum(b[1].commitment for b in model.blocks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "recomputation",
    "a memory is searched by keys and written by the forward, oldest entries first; answers are mixed in by a gate (kNN memory)",
)
def searched_memory(t: Trial) -> None:
    class Remembering(Block):
        def __init__(self) -> None:
            super().__init__()
            self.keys: list[torch.Tensor] = []
            self.values: list[torch.Tensor] = []
            self.gate = nn.Parameter(torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = super().forward(x)
            if self.keys:
                k, v = torch.cat(self.keys), torch.cat(self.values)
                near = torch.cdist(h.detach().mean(1), k).topk(2, largest=False).indices
                h = h + torch.sigmoid(self.gate) * v[near].mean(1)[:, None]
            if self.training:
                self.keys.append(h.detach().mean(1))
                self.values.append(x.detach().mean(1))
                del self.keys[:-2], self.values[:-2]
            return h

    train(t, Net(Remembering() for _ in range(2)), num_steps=5)


@attack(
    "second order",
    "a continuous flow: divergence by Hutchinson's estimate with autograd.grad inside of the block, noise drawn once per call (FFJORD)",
)
def continuous_flow(t: Trial) -> None:
    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
            self.logdet = torch.zeros(())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            e, logdet = torch.randn_like(x), x.new_zeros(())
            for _ in range(2):
                with torch.enable_grad():
                    x = x if x.requires_grad else x.detach().requires_grad_()
                    dx = self.net(x)
                    (back,) = torch.autograd.grad(dx, x, e, create_graph=True)
                logdet = logdet + 0.5 * (back * e).sum(-1).mean()
                x = x + 0.5 * dx
            self.logdet = logdet
            return x

    model = Net(Flow() for _ in range(2))
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        h = model.features(tokens(step)[0])
        loss = 0.5 * h.square().sum(-1).mean() - sum(b.logdet for b in model.blocks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "parts",
    "images are cut to patches by unfold and put together by fold within a chain, at two scales whose results are added",
    only=EXACT,
)
def patches_and_back(t: Trial) -> None:
    class Patches(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.size, self.mix = size, nn.Linear(4 * size * size, 4 * size * size)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            cut = functional.unfold(x, self.size, stride=self.size).transpose(1, 2)
            return x + functional.fold(
                (torch.tanh(self.mix(cut))).transpose(1, 2), x.shape[2:], self.size, stride=self.size
            )

    from tests.attacks.models import Images

    train(t, Images([nn.Conv2d(3, 4, 3, padding=1), Patches(2), Patches(4), nn.Conv2d(4, 4, 1)]), batch=images)


@attack(
    "recomputation",
    "the forward of each block is decorated by a timer and a retrying decorator, which hold counts in closures",
)
def decorated_forwards(t: Trial) -> None:
    import functools

    def counted(f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        calls = 0

        @functools.wraps(f)
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            call.calls = calls
            return f(*args, **kwargs) * (1 + 0.05 * calls)

        call.calls = 0
        return call

    def retried(f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(f)
        def call(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            for _ in range(3):
                try:
                    return f(self, *args, **kwargs)
                except ValueError:
                    self.failures += 1
            raise RuntimeError("three times")

        return call

    class Decorated(Block):
        failures = 0
        tries = 0

        @retried
        @counted
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.tries += 1
            if self.tries % 3 == 0:
                raise ValueError("flaky")
            return super().forward(x)

    model = Net(Decorated() for _ in range(2))
    train(t, model, after=lambda _: t.note("failures", [b.failures for b in model.blocks]))


class _KeysAndValues:
    """A cache with the methods that Hugging Face's have, which holds a learned prefix before the blocks fill it."""

    def __init__(self, prefix: torch.Tensor) -> None:
        self.held: list[torch.Tensor] = list(prefix.unbind(0))

    def get_seq_length(self, layer: int = 0) -> int:
        """How many tokens it holds."""
        return self.held[layer].shape[1]

    def update(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        """All tokens, the new ones last."""
        self.held[layer] = torch.cat([self.held[layer].expand(len(x), -1, -1), x], 1)
        return self.held[layer]


class _Prefixed(Block):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: torch.Tensor, cache: _KeysAndValues | None = None, *, use_cache: bool = False) -> torch.Tensor:
        """Tokens with the mean of all that the cache holds."""
        h = super().forward(x)
        if cache is None:
            return h
        held = cache.update(h, self.number) if use_cache else cache.held[self.number]
        return h + held.mean(1, keepdim=True)


class _PrefixNet(Net):
    returns_loss = True

    def __init__(self) -> None:
        super().__init__((_Prefixed(i) for i in range(2)), sequential=False)
        self.prefix = nn.Parameter(torch.randn(2, 1, 3, WIDTH))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """What the head is given."""
        cache, x = _KeysAndValues(self.prefix), self.stem(x)
        for block in self.blocks:
            x = block(x, cache, use_cache=True)
        return x


@attack(
    "recomputation",
    "a cache of keys of the program's own holds a learned prefix, and blocks fill it up by its update() (prefix tuning)",
)
def cache_with_a_prefix(t: Trial) -> None:
    train(t, _PrefixNet())


@attack(
    "recomputation",
    "an argument use_cache of the program's own chooses another way through the block, without any cache",
)
def use_cache_means_something_else(t: Trial) -> None:
    class Reusing(Block):
        last: torch.Tensor | None = None

        def forward(self, x: torch.Tensor, use_cache: bool = False) -> torch.Tensor:
            h = super().forward(x)
            if use_cache and self.last is not None:
                h = 0.7 * h + 0.3 * self.last
            self.last = h.detach()
            return h

    class Reusers(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = block(x, use_cache=True)
            return x

    train(t, Reusers((Reusing() for _ in range(2)), sequential=False))
