"""Layers and models as repositories write them: flows, implicit layers, solvers, experts, graphs, caches, statistics by domain, weights that several share."""

import torch
from tests.attacks.models import NUM_CLASSES, TOKENS, WIDTH, Block, Net, adamw, sgd, tokens, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


@attack(
    "recomputation",
    "a normalising flow: log-determinants beside, first batch sets scales, samples by inverse() in between",
)
def flow_with_inverse(t: Trial) -> None:
    class Coupling(nn.Module):
        def __init__(self, flipped: bool) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(WIDTH // 2, 12), nn.Tanh(), nn.Linear(12, WIDTH))
            self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
            self.register_buffer("is_set", torch.tensor(0, dtype=torch.uint8))
            self.flipped = flipped

        def forward(self, given: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            x, logdet = given
            if not self.is_set:
                with torch.no_grad():
                    self.shift.copy_(-x.mean((0, 1)))
                    self.scale.copy_(1 / (x.std((0, 1)) + 1e-3))
                    self.is_set.fill_(1)
            x = (x + self.shift) * self.scale
            logdet = logdet + self.scale.abs().log().sum()
            a, b = (x.flip(-1) if self.flipped else x).chunk(2, -1)
            s, m = self.net(a).chunk(2, -1)
            b = b * s.tanh().exp() + m
            return torch.cat([a, b], -1), logdet + s.tanh().sum(-1)

        def inverse(self, z: torch.Tensor) -> torch.Tensor:
            a, b = z.chunk(2, -1)
            s, m = self.net(a).chunk(2, -1)
            x = torch.cat([a, (b - m) * (-s.tanh()).exp()], -1)
            return (x.flip(-1) if self.flipped else x) / self.scale - self.shift

    class Flow(nn.Module):
        returns_loss = True

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(Coupling(False), Coupling(True), Coupling(False))

        def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            z, logdet = self.blocks((x, torch.zeros(x.shape[:2])))
            return (z.square().sum(-1) / 2 - logdet).mean()

    model = Flow()

    @torch.no_grad()
    def sample(_: int) -> None:
        z = torch.randn(2, 3, WIDTH)
        for block in reversed(model.blocks):
            z = block.inverse(z)
        t.note("sample", z)

    t.writes_within_step("scale", "shift")
    train(t, model, adamw(model), after=sample)


@attack(
    "second order",
    "a fixed point without graph, once more with graph, and a hook on it that solves for the gradient (DEQ)",
)
def equilibrium_by_hook(t: Trial) -> None:
    class Equilibrium(Block):
        def step(self, z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return (0.3 * self.inner(z) + x).tanh()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                z = x
                for _ in range(8):
                    z = self.step(z, x)
            z = self.step(z, x)
            if not z.requires_grad:
                return z
            begin = z.clone().detach().requires_grad_()
            again = self.step(begin, x)

            def solve(gradient: torch.Tensor) -> torch.Tensor:
                g = gradient
                for _ in range(8):
                    g = torch.autograd.grad(again, begin, g, retain_graph=True)[0] + gradient
                return g

            z.register_hook(solve)
            return z

    train(t, Net([Equilibrium(), Equilibrium()]), num_steps=3)


@attack("second order", "an ordinary differential equation whose adjoint runs the blocks again in a custom backward")
def adjoint_solver(t: Trial) -> None:
    class Adjoint(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, run, *parameters):
            with torch.no_grad():
                points = [x]
                for _ in range(3):
                    points.append(points[-1] + 0.3 * (run(points[-1]) - points[-1]))
            ctx.run, ctx.parameters = run, parameters
            ctx.save_for_backward(*points)
            return points[-1]

        @staticmethod
        def backward(ctx, gradient):
            sums = [torch.zeros_like(p) for p in ctx.parameters]
            for point in reversed(ctx.saved_tensors[:-1]):
                with torch.enable_grad():
                    leaf = point.detach().requires_grad_()
                    made = leaf + 0.3 * (ctx.run(leaf) - leaf)
                gradient, *more = torch.autograd.grad(made, [leaf, *ctx.parameters], gradient, allow_unused=True)
                sums = [s if m is None else s + m for s, m in zip(sums, more, strict=True)]
            return gradient, None, *sums

    class Solved(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            return Adjoint.apply(self.stem(x), self.blocks, *self.blocks.parameters())

    train(t, Solved(), num_steps=3)


@attack("recomputation", "statistics by domain: two forwards with another domain set on the norms, one backward pass")
def statistics_by_domain(t: Trial) -> None:
    class DomainNorm(nn.Module):
        domain = 0

        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norms[self.domain](x.transpose(1, 2)).transpose(1, 2)

    blocks = [Block(), Block()]
    for block in blocks:
        block.norm = DomainNorm()
    model = Net(blocks)
    optimizer = sgd(model)

    def switch(domain: int) -> None:
        for block in model.blocks:
            block.norm.domain = domain

    t.apply(model, optimizer)
    for step in range(4):
        switch(0)
        loss = model(*tokens(step))
        switch(1)
        loss = loss + model(*tokens(step + 50))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "recomputation",
    "batch renormalisation by hand: limits that widen with a counting buffer, statistics written in place",
)
def renormalised(t: Trial) -> None:
    class Renorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))
            self.register_buffer("mean", torch.zeros(WIDTH))
            self.register_buffer("std", torch.ones(WIDTH))
            self.register_buffer("num_batches", torch.tensor(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.training:
                return (x - self.mean) / self.std * self.weight
            mean, std = x.mean((0, 1)), x.std((0, 1), unbiased=False) + 1e-3
            limit = 1 + 0.5 * float(self.num_batches)
            r = (std.detach() / self.std).clamp(1 / limit, limit)
            d = ((mean.detach() - self.mean) / self.std).clamp(-limit + 1, limit - 1)
            with torch.no_grad():
                self.mean += 0.1 * (mean - self.mean)
                self.std += 0.1 * (std - self.std)
                self.num_batches += 1
            return ((x - mean) / std * r + d) * self.weight

    blocks = [Block(), Block()]
    for block in blocks:
        block.norm = Renorm()
    train(t, Net(blocks))


@attack(
    "recomputation",
    "spectral norm by hand: power iteration in the forward writes u in place, in blocks and in the head",
)
def power_iteration_by_hand(t: Trial) -> None:
    class Spectral(nn.Linear):
        def __init__(self, given: int, made: int) -> None:
            super().__init__(given, made)
            self.register_buffer("u", functional.normalize(torch.randn(made), dim=0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                v = functional.normalize(self.weight.t() @ self.u, dim=0)
                if self.training:
                    self.u.copy_(functional.normalize(self.weight @ v, dim=0))
            return functional.linear(x, self.weight / (self.u @ self.weight @ v), self.bias)

    model = Net([Block(), Block()])
    for block in model.blocks:
        block.wide = Spectral(WIDTH, 2 * WIDTH)
    model.head = Spectral(WIDTH, NUM_CLASSES)
    train(t, model)


@attack(
    "recomputation",
    "learned steps of quantised weights and inputs, set from the first batch through .data (LSQ), in the head too",
)
def learned_quantisation(t: Trial) -> None:
    class Quantised(nn.Linear):
        def __init__(self, given: int, made: int) -> None:
            super().__init__(given, made)
            self.step = nn.Parameter(torch.tensor(1.0))
            self.ready = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.ready:
                self.step.data.fill_(float(x.abs().mean()) / 4)
                self.ready = True
            scale = (self.step - self.step * 0.1).detach() + self.step * 0.1
            clipped = (x / scale).clamp(-7, 7)
            rounded = (clipped.round() - clipped).detach() + clipped
            return functional.linear(rounded * scale, self.weight, self.bias)

    model = Net([Block(), Block()])
    for block in model.blocks:
        block.narrow = Quantised(2 * WIDTH, WIDTH)
    model.head = Quantised(WIDTH, NUM_CLASSES)
    t.writes_within_step(".step")
    train(t, model, sgd(model, lr=0.03), num_steps=5)


@attack(
    "parts",
    "experts with a capacity put their losses on a list of the class, summed and cleared by the loop (Megatron)",
)
def experts_with_list_of_losses(t: Trial) -> None:
    class Experts(Block):
        losses: list = []  # noqa: RUF012 - a list of the class is what is tried

        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 3)
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            rows = self.norm(x).flatten(0, 1)
            shares = self.router(rows).softmax(-1)
            weight, chosen = shares.max(-1)
            out = torch.zeros_like(rows)
            for number, expert in enumerate(self.experts):
                places = (chosen == number).nonzero().flatten()[: rows.shape[0] // 2]
                out.index_add_(0, places, expert(rows[places]) * weight[places, None])
            load = functional.one_hot(chosen, 3).to(rows.dtype).mean(0)
            Experts.losses.append((load * shares.mean(0)).sum() * 3)
            return out.view_as(x)

    model = Net([Experts(), Experts()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    try:
        for step in range(4):
            loss = model(*tokens(step))
            t.note("count", len(Experts.losses))
            total = loss + 0.1 * torch.stack(Experts.losses).sum()
            Experts.losses.clear()
            optimizer.zero_grad()
            total.backward()
            t.note("left", len(Experts.losses))
            optimizer.step()
            t.note("loss", total)
            t.end_step()
    finally:
        Experts.losses.clear()


@attack(
    "recomputation",
    "edges are set on all blocks before the forward, and those of the next graph before the backward pass",
)
def edges_set_on_blocks(t: Trial) -> None:
    class Message(Block):
        edges: torch.Tensor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sources, goals = self.edges
            sent = self.inner(x)[:, sources]
            index = goals[None, :, None].expand_as(sent)
            return x + torch.zeros_like(x).scatter_reduce(1, index, sent, "mean", include_self=False)

    model = Net([Message(), Message()])
    optimizer = sgd(model)

    def load(step: int) -> None:
        edges = torch.randint(
            0, TOKENS, (2, 9 + step), generator=torch.Generator(torch.get_default_device()).manual_seed(step)
        )
        for block in model.blocks:
            block.edges = edges

    t.apply(model, optimizer)
    load(0)
    for step in range(4):
        loss = model(*tokens(step))
        load(step + 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("recomputation", "keys and values of a generated prefix are kept on the blocks, and training attends to them")
def cache_of_generated_prefix(t: Trial) -> None:
    class Cached(Block):
        is_attention = True

        def __init__(self) -> None:
            super().__init__()
            self.cache: torch.Tensor | None = None
            self.fills = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            keys = self.norm(x)
            if self.cache is not None:
                keys = torch.cat([self.cache, keys], 1)
            if self.fills:
                self.cache = keys
            length = keys.shape[1]
            mask = torch.ones(x.shape[1], length, dtype=torch.bool).tril(length - x.shape[1])
            scores = (x @ keys.transpose(1, 2) / WIDTH**0.5).masked_fill(~mask, float("-inf"))
            return x + self.inner(scores.softmax(-1) @ keys)

    model = Net([Cached(), Cached()])

    @torch.no_grad()
    def generate(step: int) -> None:
        for block in model.blocks:
            block.cache, block.fills = None, True
        x = tokens(step + 50, length=1)[0]
        for _ in range(3):
            x = functional.pad(model(x), (0, 1))
        for block in model.blocks:
            block.fills = False

    train(t, model, before=generate)


@attack(
    "parts", "a forward sees its batch twice with other dropout, and the two predictions are pulled together (R-Drop)"
)
def predictions_pulled_together(t: Trial) -> None:
    class Twice(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            logits = self.head(functional.dropout(self.features(torch.cat([x, x])), 0.3, self.training))
            if y is None:
                return logits
            p, q = logits.log_softmax(-1).chunk(2)
            apart = functional.kl_div(p, q, log_target=True, reduction="batchmean")
            return self.loss(logits, torch.cat([y, y])) + 0.1 * apart

    train(t, Twice())
