"""Tensors, operators, optimizers and attention of kinds that published code has: subclasses, classes asked for, positions by slices, rare pooling."""

import math
from typing import Any

import torch
from tests.attacks.models import (
    BATCH,
    NUM_CLASSES,
    TOKENS,
    WIDTH,
    Block,
    Images,
    Net,
    adamw,
    images,
    sgd,
    tokens,
    train,
)
from tests.attacks.places import EXACT, WITHOUT_TILES
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


@attack("gradients", "the class of each gradient decides: torch.Tensor is clamped, anything else is doubled")
def gradient_by_class(t: Trial) -> None:
    model = Net()

    def between(_: int) -> None:
        for p in model.parameters():
            if type(p.grad) is torch.Tensor:
                p.grad.clamp_(-0.05, 0.05)
            else:
                p.grad.mul_(2)

    train(t, model, between=between)


@attack("gradients", "the __class__ of each parameter and of each state decides what is decayed", only=EXACT)
def parameter_by_class(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)

    def after(_: int) -> None:
        with torch.no_grad():
            for p in model.parameters():
                plain = p.__class__ is nn.Parameter and type(p) is nn.Parameter
                p.mul_(0.99 if plain else 0.5)
                plain = all(type(each) is torch.Tensor for each in optimizer.state[p].values())
                p.add_(0.0 if plain else 1.0)

    train(t, model, optimizer, after=after)


class _Deciding(Block):
    """Attention by hand whose scores decide, by what they are, how they are scaled."""

    is_attention = True

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.made = made
        self.bias = nn.Parameter(torch.zeros(TOKENS, TOKENS))
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens that have looked at each other."""
        return x + self.inner(self.made(self, self.query(x), self.key(x), self.value(x)))


def _attend(t: Trial, made: Any, **settings: Any) -> None:
    train(t, Net([_Deciding(made), _Deciding(made)]), **settings)


def _causal(scores: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)


@attack("parts", "attention whose scores are asked for their class", only=WITHOUT_TILES)
def scores_by_class(t: Trial) -> None:
    def made(_: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.transpose(-2, -1) / math.sqrt(WIDTH)
        if type(scores) is not torch.Tensor or scores.__class__ is not torch.Tensor:
            scores = scores * 3
        return scores.softmax(-1) @ v

    _attend(t, made)


@attack("parts", "attention by baddbmm with its scale as alpha (diffusers), and a bias that is learned (T5)")
def scores_by_baddbmm(t: Trial) -> None:
    def made(block: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        bias = block.bias[: q.shape[1], : q.shape[1]].expand(len(q), -1, -1)
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), beta=1, alpha=WIDTH**-0.5)
        return torch.bmm(scores.softmax(-1), v)

    _attend(t, made)


@attack("parts", "cosine attention with a learned and clamped scale (Swin v2), and a dropout that the loop raises")
def cosine_attention(t: Trial) -> None:
    rate = [0.0]

    def made(block: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = functional.normalize(q, dim=-1) @ functional.normalize(k, dim=-1).transpose(-2, -1)
        weights = (scores * block.log_scale.clamp(max=math.log(100)).exp()).softmax(-1)
        return functional.dropout(weights, rate[0], training=block.training) @ v

    _attend(t, made, before=lambda step: rate.__setitem__(0, 0.2 if step > 1 else 0.0))


@attack("parts", "weights of attention multiply the values and a table of relative positions as well")
def weights_used_twice(t: Trial) -> None:
    def made(block: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        weights = _causal(q @ k.transpose(-2, -1) / math.sqrt(WIDTH)).softmax(-1)
        return weights @ v + (weights * block.bias).sum(-1, keepdim=True)

    _attend(t, made)


@attack(
    "parts",
    "attention becomes causal only while training (a flag that the loop sets), and its scores are capped by a clamp",
)
def causal_later(t: Trial) -> None:
    flag = [False]

    def made(_: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = (q @ k.transpose(-2, -1)).clamp(-2, 2)
        return (_causal(scores) if flag[0] else scores).softmax(-1) @ v

    _attend(t, made, before=lambda step: flag.__setitem__(0, step >= 2))


class _Tagged(torch.Tensor):
    """An image with its meta-data, as fastai and MONAI have it; operators keep the class."""


@attack("parts", "the batch is of a subclass of torch.Tensor, which blocks ask for and its operators keep")
def subclass_as_input(t: Trial) -> None:
    class Asking(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x) * (2.0 if isinstance(x, _Tagged) else 1.0)

    def batch(step: int) -> Any:
        x, y = tokens(step)
        return x.as_subclass(_Tagged), y

    model = Net([Asking(), Asking()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        loss = model(*batch(step)).as_subclass(torch.Tensor)
        t.note("loss", loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.end_step()


@attack("parts", "positions are a slice of a buffer by the length of the input, inside of the block")
def positions_by_slice(t: Trial) -> None:
    class Placed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("places", torch.randn(1, 16, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x + self.places[:, : x.size(1)])

    train(t, Net([Placed(), Placed()]))


@attack(
    "parts",
    "the norm is over tokens and features together (layer_norm of x.shape[1:]), and a Frobenius norm over everything",
)
def norm_over_both(t: Trial) -> None:
    class Both(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(functional.layer_norm(x, x.shape[1:])) / (1 + 0.01 * torch.linalg.norm(x))

    train(t, Net([Both(), Both()]))


@attack("parts", "the block iterates until its largest change is small (a fixed point with a stopping rule)")
def until_converged(t: Trial) -> None:
    class Iterating(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.zeros_like(x)
            for _ in range(6):
                new = torch.tanh(0.3 * self.inner(h) + x)
                done = (new - h).abs().max() < 0.05
                h = new
                if done:
                    break
            return h

    train(t, Net([Iterating(), Iterating()]))


@attack(
    "parts", "tokens halt one by one and the others go on (adaptive computation time), with their count as a penalty"
)
def halting_tokens(t: Trial) -> None:
    class Halting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.halt = nn.Linear(WIDTH, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            left, out = torch.ones_like(x[..., :1]), torch.zeros_like(x)
            for _ in range(4):
                x = x + self.inner(x)
                p = torch.minimum(self.halt(x).sigmoid(), left)
                out, left = out + p * x, left - p
                if bool((left < 0.01).all()):
                    break
            return out + left * x

    train(t, Net([Halting(), Halting()]))


@attack("parts", "only the tokens with the largest scores go through the layers (mixture of depths)")
def mixture_of_depths(t: Trial) -> None:
    class Some(Block):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight, chosen = self.router(x).squeeze(-1).topk(max(1, x.shape[1] // 2), dim=1)
            index = chosen.unsqueeze(-1).expand(-1, -1, WIDTH)
            return x.scatter_add(1, index, weight.unsqueeze(-1).sigmoid() * self.inner(x.gather(1, index)))

    train(t, Net([Some(), Some()]))


@attack("parts", "an assertion on the values and one on the length stand in the block, and never fail")
def assertions_in_block(t: Trial) -> None:
    class Asserting(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.dim() == 3 and x.shape[1] <= 4 * TOKENS, f"too long: {x.shape}"
            out = super().forward(x)
            if not torch.isfinite(out).all():
                raise FloatingPointError("not finite")
            return out

    train(t, Net([Asserting(), Asserting()]))


@attack(
    "parts",
    "a recurrent layer over the tokens inside of the block (LSTM, batch first), and a selective scan by a loop (Mamba)",
)
def recurrent_blocks(t: Trial) -> None:
    class Recurrent(Block):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.lstm(self.norm(x))[0]

    class Scanning(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state, gate, out = torch.zeros_like(x[:, 0]), self.inner(x).sigmoid(), []
            for i in range(x.shape[1]):
                state = gate[:, i] * state + (1 - gate[:, i]) * x[:, i]
                out.append(state)
            return x + torch.stack(out, 1)

    train(t, Net([Recurrent(), Scanning()], sequential=False))


@attack(
    "parts", "global response normalisation (ConvNeXt v2), blurred pooling and a layer norm over channels in the chain"
)
def response_norm_in_chain(t: Trial) -> None:
    class Response(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            size = x.norm(dim=(2, 3), keepdim=True)
            return x * size / (size.mean(1, keepdim=True) + 1e-6) + x

    class OverChannels(nn.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    train(t, Images([nn.Conv2d(3, 4, 3, padding=1), Response(), OverChannels(4), nn.AvgPool2d(2)]), batch=images)


@attack(
    "parts",
    "a chain with a resize to a fixed size, a negative padding, max pooling with overlaps and a random leaky relu in evaluation",
)
def resized_in_chain(t: Trial) -> None:
    slope = nn.RReLU()
    layers = [
        nn.Conv2d(3, 4, (1, 5), padding=(0, 2)),
        nn.ZeroPad2d(-1),
        nn.MaxPool2d(3, 1),
        slope.eval(),
        nn.Upsample(size=(6, 6), mode="bilinear"),
    ]
    model = Images(layers)
    train(t, model, batch=images)


@attack("parts", "wide and tall images by turns in a chain of strided, depthwise and pointwise convolutions")
def wide_and_tall(t: Trial) -> None:
    def batch(step: int) -> Any:
        chance = torch.Generator(torch.get_default_device()).manual_seed(step)
        size = (4, 14) if step % 2 else (13, 5)
        x = torch.randn(BATCH, 3, *size, generator=chance, dtype=torch.float64).to(torch.get_default_dtype())
        return x, torch.randint(0, NUM_CLASSES, (BATCH,), generator=chance)

    layers = [
        nn.Conv2d(3, 6, 3, stride=2, padding=1, groups=3),
        nn.Hardswish(),
        nn.Conv2d(6, 4, 1),
        nn.Conv2d(4, 4, 3, padding=2, dilation=2),
    ]
    train(t, Images(layers), batch=batch)


@attack(
    "gradients",
    "optimizers of torch's that are seldom tried: Adagrad, RMSprop centred, ASGD, Adamax and Adafactor on a part each",
)
def five_optimizers(t: Trial) -> None:
    model = Net([Block(), Block(), Block()])
    parts = [model.stem, *model.blocks, model.head]
    made = [torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.ASGD, torch.optim.Adamax, torch.optim.Adafactor]
    settings = [{}, {"centered": True, "momentum": 0.5}, {}, {}, {}]
    optimizers = [
        kind(part.parameters(), lr=1e-3, **more) for kind, part, more in zip(made, parts, settings, strict=True)
    ]
    t.apply(model, *optimizers)
    for step in range(4):
        loss = model(*tokens(step))
        t.note("loss", loss)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        t.end_step()


@attack(
    "gradients",
    "an optimizer with one step size for all, learned from dot products of gradients and weights over all groups (D-Adaptation)",
)
def adapted_step_size(t: Trial) -> None:
    class Adapted(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"d": 1e-2, "k": 0})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            group = self.param_groups[0]
            top = torch.zeros(())
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state.setdefault("begin", p.clone())
                    top = top + (p.grad * (state["begin"] - p)).sum()
            group["d"] = max(group["d"], float(top.abs()))
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["d"] * p.grad)

    model = Net()
    optimizer = Adapted(model.parameters())
    train(t, model, optimizer, after=lambda _: t.note("d", optimizer.param_groups[0]["d"]))


@attack(
    "gradients",
    "weights are exchanged for their average around each evaluation by the optimizer itself (schedule-free)",
    only=EXACT,
)
def schedule_free(t: Trial) -> None:
    class Free(torch.optim.SGD):
        def exchanged(self) -> None:
            with torch.no_grad():
                for group in self.param_groups:
                    for p in group["params"]:
                        other = self.state[p].setdefault("average", p.detach().clone())
                        kept = p.detach().clone()
                        p.copy_(other)
                        other.copy_(kept)

        def blended(self) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p].setdefault("average", p.detach().clone()).lerp_(p.detach(), 0.3)

    model = Net()
    optimizer = Free(model.parameters(), lr=0.1)

    def evaluate(_: int) -> None:
        optimizer.blended()
        optimizer.exchanged()
        with torch.no_grad():
            t.note("evaluation", model(*tokens(30)))
        optimizer.exchanged()

    train(t, model, optimizer, after=evaluate)


@attack(
    "gradients",
    "an object that is no Optimizer holds one: it counts, accumulates and decides when the real one steps (accelerate)",
)
def held_optimizer(t: Trial) -> None:
    class Holder:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer, self.calls = optimizer, 0

        def step(self) -> None:
            self.calls += 1
            if self.calls % 2 == 0:
                self.optimizer.step()

        def zero_grad(self) -> None:
            if self.calls % 2 == 0:
                self.optimizer.zero_grad()

    model = Net()
    inner = sgd(model)
    held = Holder(inner)
    t.apply(model, inner)
    for step in range(6):
        loss = model(*tokens(step)) / 2
        t.note("loss", loss)
        loss.backward()
        held.step()
        held.zero_grad()
        t.end_step()


@attack(
    "gradients",
    "schedules are made after the plan, chained, saved and loaded into new ones while training (cyclic momentum)",
)
def schedules_made_later(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)

    def made() -> Any:
        return torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2, cycle_momentum=True)

    schedule = made()
    for step in range(6):
        if step == 3:
            state = schedule.state_dict()
            schedule = made()
            schedule.load_state_dict(state)
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        t.note("rate", [optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]])
        t.end_step()


@attack(
    "gradients",
    "hooks on saving and loading of the optimizer's states change what is kept, and groups have names and keys of their own",
)
def optimizer_state_hooks(t: Trial) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(
        [
            {"params": list(part.parameters()), "name": name, "scale": 1.0 + i}
            for i, (name, part) in enumerate(model.named_children())
        ],
        lr=1e-2,
    )
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: {k: v for k, v in state.items() if k != "extra"})

    def after(step: int) -> None:
        if step == 1:
            state = optimizer.state_dict()
            t.note("extra", state["extra"])
            optimizer.load_state_dict(state)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / group["scale"] ** step

    train(t, model, optimizer, after=after)


def _kept_weights(t: Trial, ask: Any, read: Any = lambda *_: None) -> None:
    """Trains with attention that keeps its weights on the block: `ask(weights, loss)` before the backward pass, `read(t, weights)` after it."""

    def made(block: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        block.seen = (q @ k.transpose(-2, -1) / math.sqrt(WIDTH)).softmax(-1)
        return block.seen @ v

    model = Net([_Deciding(made), _Deciding(made)])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        loss = model(*tokens(step))
        t.note("loss", loss)
        weights = [block.seen for block in model.blocks]
        for each in weights:
            ask(each, loss)
        optimizer.zero_grad()
        loss.backward()
        for block, each in zip(model.blocks, weights, strict=True):
            read(t, each)
            block.seen = None
        optimizer.step()
        t.end_step()


_OF_ATTENTION = ("attention", "chunked loss, gradients in forward", "micro-batches", "update in backward")


@attack(
    "parts",
    "weights of attention kept on the block are asked to keep their gradient before the backward pass (Grad-CAM)",
    only=_OF_ATTENTION,
)
def late_retain_of_weights(t: Trial) -> None:
    _kept_weights(t, lambda weights, _: weights.retain_grad(), lambda t, weights: t.note("gradient", weights.grad))


@attack(
    "parts",
    "weights of attention kept on the block get a hook before the backward pass, which halves their gradient",
    only=_OF_ATTENTION,
)
def late_hook_on_weights(t: Trial) -> None:
    _kept_weights(t, lambda weights, _: weights.register_hook(lambda g: g * 0.5))


@attack(
    "parts",
    "the gradient of the loss with respect to weights of attention that are kept on the block is logged",
    only=_OF_ATTENTION,
)
def gradient_of_weights(t: Trial) -> None:
    _kept_weights(t, lambda weights, loss: t.note("gradient", torch.autograd.grad(loss, weights, retain_graph=True)))
