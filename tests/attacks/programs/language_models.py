"""Language models as people train them now: preferences and rewards, experts, several heads, caches, scans, low-bit layers, adapters."""

import contextlib
import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from tests.attacks.models import BATCH, NUM_CLASSES, TOKENS, WIDTH, Block, Net, adamw, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


def log_probabilities(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of each token's class."""
    return model(x).log_softmax(-1).gather(-1, y[..., None])[..., 0]


class Switched(Block):
    """A block with a low-rank adapter that may be off."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.randn(2, WIDTH) * 0.1)
        self.on = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y + x @ self.a @ self.b if self.on else y


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The reference model of preference training with adapters."""
    for block in model.blocks:
        block.on = False
    yield
    for block in model.blocks:
        block.on = True


@attack(
    "recomputation",
    "the reference of preference training is the same model with its adapters off, run after the policy (DPO)",
)
def reference_without_adapters(t: Trial) -> None:
    model = Net([Switched(), Switched()])
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith((".a", ".b", "head.weight")))
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        (x, y), (_, z) = tokens(step), tokens(step + 50)
        chosen, rejected = log_probabilities(model, x, y), log_probabilities(model, x, z)
        with adapters_off(model), torch.no_grad():
            of_chosen, of_rejected = log_probabilities(model, x, y), log_probabilities(model, x, z)
        loss = -functional.logsigmoid(0.5 * ((chosen - of_chosen) - (rejected - of_rejected)).sum(-1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("recomputation", "the same with the adapters still off when the backward pass runs (a leaked context)")
def reference_leaks(t: Trial) -> None:
    model = Net([Switched(), Switched()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        loss = model(x, y)
        with adapters_off(model):
            with torch.no_grad():
                loss_of_reference = model(x, y)
            optimizer.zero_grad()
            (loss - loss_of_reference).backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "groups of sampled answers, advantages within each, a clipped ratio and a divergence to a frozen copy (GRPO)",
)
def grouped_policy(t: Trial) -> None:
    model = Net()
    reference = copy.deepcopy(model).requires_grad_(False).eval()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(3):
        x = tokens(step, batch=2)[0].repeat_interleave(2, 0)
        model.eval()
        with torch.no_grad():
            y = torch.distributions.Categorical(logits=model(x)).sample()
            old, fixed = log_probabilities(model, x, y), log_probabilities(reference, x, y)
        model.train()
        reward = (y == 3).to(x.dtype).mean(-1).view(2, 2)
        advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        for _ in range(2):
            new = log_probabilities(model, x, y)
            ratio = (new - old).exp()
            divergence = (fixed - new).exp() - (fixed - new) - 1
            gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            loss = -(gain - 0.04 * divergence).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            t.note("loss", loss)
            t.end_step()


@attack(
    "gradients",
    "a value head beside the policy's on one trunk, both losses clipped, minibatches of a shuffled rollout (PPO)",
)
def value_head(t: Trial) -> None:
    class Valued(Net):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Linear(WIDTH, 1)

        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
            h = self.features(x)
            return self.head(h), self.value(h).squeeze(-1)

    model = Valued()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(2):
        x, y = tokens(step)
        with torch.no_grad():
            logits, old_values = model(x)
            old = logits.log_softmax(-1).gather(-1, y[..., None])[..., 0]
        returns = torch.linspace(0, 1, TOKENS).expand(BATCH, -1).to(x.dtype)
        for part in torch.randperm(BATCH).split(2):
            logits, values = model(x[part])
            new = logits.log_softmax(-1).gather(-1, y[part][..., None])[..., 0]
            advantage = (returns - old_values)[part]
            ratio = (new - old[part]).exp()
            policy = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.9, 1.1)).mean()
            near = old_values[part] + (values - old_values[part]).clamp(-0.2, 0.2)
            critic = torch.max((values - returns[part]).square(), (near - returns[part]).square()).mean()
            entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
            optimizer.zero_grad()
            (policy + 0.5 * critic - 0.01 * entropy).backward()
            optimizer.step()
            t.note("policy", policy)
            t.end_step()


@attack(
    "gradients",
    "further heads, each a module with a projection of the last one's state, share embedding and head (multi-token prediction)",
)
def chained_token_heads(t: Trial) -> None:
    class Further(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.project, self.block = nn.Linear(2 * WIDTH, WIDTH), Block()
            self.shared = [model]

        def forward(self, h: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            model = self.shared[0]
            h = self.block(self.project(torch.cat([h[:, :-1], model.stem(x[:, 1:])], -1)))
            return h, model.head(h)

    class Chained(Net):
        def __init__(self) -> None:
            super().__init__()
            self.further = nn.ModuleList([Further(self), Further(self)])

        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            h = self.features(x)
            loss = self.loss(self.head(h), y)
            for i, each in enumerate(self.further):
                h, logits = each(h, x[:, i:])
                loss = loss + 0.3 * self.loss(logits, y[:, i + 1 :])
            return loss

    train(t, Chained())


@attack(
    "gradients", "the head's weight is a property that returns the stem's weight, which the head has no parameter of"
)
def head_tied_by_property(t: Trial) -> None:
    class Tied(nn.Module):
        def __init__(self, stem: nn.Linear) -> None:
            super().__init__()
            self.of = [stem]

        @property
        def weight(self) -> torch.Tensor:
            return self.of[0].weight[:NUM_CLASSES]

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            return functional.linear(h, self.weight)

    model = Net()
    model.head = Tied(model.stem)
    train(t, model)


class Attention(nn.Module):
    """Attention by hand with normalised queries and keys, and what subclasses do to the scores."""

    is_attention = True

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return q @ k.transpose(-1, -2) / math.sqrt(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(self.scores(q, k).softmax(-1) @ v)


@attack(
    "recomputation", "rotary tables are registered as buffers by the forward, made longer when a longer input comes"
)
def rotary_buffers_in_forward(t: Trial) -> None:
    class Rotary(Attention):
        def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            length = q.shape[1]
            if not hasattr(self, "cos") or self.cos.shape[0] < length:
                angle = torch.outer(torch.arange(length), 10.0 ** -torch.arange(WIDTH // 2))
                angle = torch.cat([angle, angle], -1).to(q.dtype)
                self.register_buffer("cos", angle.cos(), persistent=False)
                self.register_buffer("sin", angle.sin(), persistent=False)

            def turned(x: torch.Tensor) -> torch.Tensor:
                a, b = x.chunk(2, -1)
                return x * self.cos[:length] + torch.cat([-b, a], -1) * self.sin[:length]

            return super().scores(turned(functional.normalize(q, dim=-1)), turned(functional.normalize(k, dim=-1)))

    train(t, Net([Rotary(), Rotary()]), batch=lambda i: tokens(i, length=4 + i), num_steps=5)


@attack(
    "recomputation",
    "keys and values of a shared prefix are computed once with gradients and used by several suffixes' forwards",
)
def prefix_cache_with_gradients(t: Trial) -> None:
    class Cached(Attention):
        cache: tuple[torch.Tensor, torch.Tensor] | None = None
        writes = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            if self.writes:
                self.cache = k, v
            elif self.cache is not None:
                k, v = torch.cat([self.cache[0], k], 1), torch.cat([self.cache[1], v], 1)
            return x + self.out(self.scores(q, k).softmax(-1) @ v)

    model = Net([Cached(), Cached()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        (x, y), (z, w) = tokens(step), tokens(step + 50)
        for block in model.blocks:
            block.writes = True
        loss = model(x, y)
        for block in model.blocks:
            block.writes = False
        loss = loss + model(z, w) + model(z.flip(1), w.flip(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


class Experts(Block):
    """Experts as one tensor of weights each, with a router; subclasses choose."""

    def __init__(self, num: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, num, bias=False)
        self.up, self.down = (
            nn.Parameter(torch.randn(num, WIDTH, 4) * 0.3),
            nn.Parameter(torch.randn(num, 4, WIDTH) * 0.3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.norm(x).reshape(-1, WIDTH)
        return x + self.mixed(flat).view_as(x)

    def mixed(self, flat: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


@attack(
    "gradients",
    "a bias of experts is moved by the loop after the step, by loads that the forward counted in a buffer (DeepSeek)",
    only=EXACT,
)
def bias_moved_after_step(t: Trial) -> None:
    class Biased(Experts):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bias", torch.zeros(3))
            self.register_buffer("load", torch.zeros(3))

        def mixed(self, flat: torch.Tensor) -> torch.Tensor:
            share = self.router(flat).sigmoid()
            index = (share + self.bias).topk(2, -1).indices
            self.load += torch.bincount(index.flatten(), minlength=3)
            weights = share.gather(-1, index)
            weights = weights / weights.sum(-1, keepdim=True)
            out = torch.zeros_like(flat)
            for expert in range(3):
                rows, slot = (index == expert).nonzero(as_tuple=True)
                part = (flat[rows] @ self.up[expert]).relu() @ self.down[expert]
                out = out.index_add(0, rows, part * weights[rows, slot, None])
            return out

    model = Net([Biased(), Biased()])

    def balance(_: int) -> None:
        for block in model.blocks:
            block.bias += 0.1 * (block.load.mean() - block.load).sign()
            block.load.zero_()

    train(t, model, after=balance, num_steps=5)


@attack("parts", "tokens are sorted by expert and split by counts read as a list (dropless), an expert may have none")
def dropless_split(t: Trial) -> None:
    class Split(Experts):
        def mixed(self, flat: torch.Tensor) -> torch.Tensor:
            best, index = self.router(flat).softmax(-1).max(-1)
            order = index.argsort(stable=True)
            counts = torch.bincount(index, minlength=3).tolist()
            parts = [(rows @ self.up[e]).relu() @ self.down[e] for e, rows in enumerate(flat[order].split(counts))]
            return torch.empty_like(flat).index_copy(0, order, torch.cat(parts)) * best[:, None]

    train(t, Net([Split(), Split()]))


@attack(
    "recomputation",
    "a state of the recurrence stays on the block from one chunk of the sequence to the next within a step (RWKV)",
)
def state_over_chunks(t: Trial) -> None:
    class Recurrent(Block):
        state: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = torch.zeros_like(x[:, :1]) if self.state is None else self.state
            mixed = torch.cat([before, x[:, :-1]], 1)
            self.state = x[:, -1:]
            return x + self.inner(0.5 * (x + mixed))

    model = Net([Recurrent(), Recurrent()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        loss = sum(model(a, b) for a, b in zip(x.split(2, 1), y.split(2, 1), strict=True))
        for block in model.blocks:
            block.state = None
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "recomputation", "blocks are run a drawn number of times, all but the last two without gradients (recurrent depth)"
)
def recurrent_depth(t: Trial) -> None:
    class Deep(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            start = self.stem(x)
            h = torch.randn_like(start)
            for left in reversed(range(int(torch.poisson(torch.tensor(3.0))) + 2)):
                with torch.set_grad_enabled(torch.is_grad_enabled() and left < 2):
                    h = self.blocks(h + start)
            return h

    train(t, Deep(), num_steps=5)


class Scaled(torch.autograd.Function):
    """A product in a simulated 8-bit format with delayed scales; forward and backward pass write the largest values that they saw."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, seen: torch.Tensor, seen_back: torch.Tensor
    ) -> torch.Tensor:
        scale = 448 / seen.max().clamp(min=1e-3)
        seen.copy_(seen.roll(1, 0))
        seen[0] = x.detach().abs().max()
        ctx.save_for_backward(x, weight)
        ctx.seen_back = seen_back
        return (x * scale).round() / scale @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        scale = 57344 / ctx.seen_back.max().clamp(min=1e-6)
        ctx.seen_back.copy_(ctx.seen_back.roll(1, 0))
        ctx.seen_back[0] = grad.abs().max()
        grad = (grad * scale).round() / scale
        return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2), None, None


@attack(
    "gradients",
    "linear layers in a simulated 8-bit format, whose largest values are kept in histories by forward and backward pass",
)
def delayed_scaling(t: Trial) -> None:
    class Low(nn.Linear):
        def __init__(self, a: int, b: int) -> None:
            super().__init__(a, b)
            self.register_buffer("seen", torch.ones(3))
            self.register_buffer("seen_back", torch.ones(3) * 1e-2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Scaled.apply(x, self.weight, self.seen, self.seen_back) + self.bias

    class Quantised(Block):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = Low(WIDTH, 2 * WIDTH), Low(2 * WIDTH, WIDTH)

    train(t, Net([Quantised(), Quantised()]))


class Dequantised(torch.autograd.Function):
    """A product with a weight of integers, which is made again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.codes, ctx.scale = codes, scale
        return x @ (codes.to(x.dtype) * scale).T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad @ (ctx.codes.to(grad.dtype) * ctx.scale), None, None


@attack(
    "gradients",
    "frozen weights of integers behind a custom function, adapters beside, stored with their scales in one parameter class (QLoRA)",
)
def quantised_with_adapters(t: Trial) -> None:
    class Codes(nn.Parameter):
        def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> "Codes":
            self = torch.Tensor._make_subclass(cls, data, False)
            self.scale = scale
            return self

    class Low(nn.Module):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            full = torch.randn(b, a) * 0.3
            scale = full.abs().amax(1, keepdim=True) / 7
            self.weight = Codes((full / scale).round().to(torch.int8), scale)
            self.a, self.b = nn.Parameter(torch.randn(2, a) * 0.3), nn.Parameter(torch.zeros(b, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Dequantised.apply(x, self.weight, self.weight.scale) + x @ self.a.T @ self.b.T

    class Quantised(Block):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = Low(WIDTH, 2 * WIDTH), Low(2 * WIDTH, WIDTH)

    train(t, Net([Quantised(), Quantised()]))
