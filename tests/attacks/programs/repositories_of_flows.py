"""Flows, bounds and mixtures as their repositories train them: scales from the first batch, path gradients, shares drawn in both passes."""

import math
import random
from typing import Any

import torch
from tests.attacks.models import WIDTH, Block, Images, Net, adamw, images, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


@attack(
    "gradients",
    "importance-weighted bounds whose path gradients are squared by a hook on the sample (doubly reparameterised)",
    only=EXACT,
)
def doubly_reparameterised(t: Trial) -> None:
    class Inference(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, 6)
            self.decoder = nn.Sequential(nn.Linear(3, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mean, log_scale = self.head(self.features(x).mean(1)).chunk(2, -1)
            q = torch.distributions.Normal(mean, log_scale.exp())
            z = q.rsample((4,))
            # The density's own gradient stops: only the path is differentiated.
            stopped = torch.distributions.Normal(mean.detach(), log_scale.exp().detach())
            prior = torch.distributions.Normal(torch.zeros(()), torch.ones(()))
            weights = (
                prior.log_prob(z).sum(-1) - stopped.log_prob(z).sum(-1) - (self.decoder(z) - x.mean(1)).square().sum(-1)
            )
            with torch.no_grad():
                normed = torch.exp(weights - torch.logsumexp(weights, dim=0, keepdim=True))
            if z.requires_grad:
                z.register_hook(lambda gradient: normed.unsqueeze(-1) * gradient)
            return -(normed * weights).sum(0).mean()

    model = Inference()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(tokens(step)[0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "recomputation",
    "a flow whose first batch runs without gradients to set scales, mixing weights by an LU in buffers, pieces split off (Glow)",
    only=EXACT,
)
def glow(t: Trial) -> None:
    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loc, self.scale = nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.Parameter(torch.ones(1, 1, WIDTH))
            self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))
            q, _ = torch.linalg.qr(torch.randn(WIDTH, WIDTH))
            p, low, up = torch.linalg.lu(q)
            self.register_buffer("w_p", p)
            self.register_buffer("u_mask", torch.triu(torch.ones(WIDTH, WIDTH), 1))
            self.register_buffer("s_sign", torch.sign(torch.diag(up)))
            self.w_l, self.w_u = nn.Parameter(low), nn.Parameter(torch.triu(up, 1))
            self.w_s = nn.Parameter(torch.log(torch.abs(torch.diag(up))))
            self.net = nn.Sequential(nn.Linear(WIDTH // 2, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))
            self.net[2].weight.data.zero_()

        def forward(self, x: torch.Tensor, logdet: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if self.initialized.item() == 0:
                with torch.no_grad():
                    self.loc.data.copy_(-x.mean((0, 1), keepdim=True))
                    self.scale.data.copy_(1 / (x.std((0, 1), keepdim=True) + 1e-6))
                self.initialized.fill_(1)
            x = self.scale * (x + self.loc)
            logdet = logdet + x.shape[1] * torch.sum(torch.log(torch.abs(self.scale)))
            low = self.w_l * self.u_mask.T + torch.eye(WIDTH)
            w = self.w_p @ low @ ((self.w_u * self.u_mask) + torch.diag(self.s_sign * torch.exp(self.w_s)))
            x, logdet = functional.linear(x, w), logdet + x.shape[1] * torch.sum(self.w_s)
            a, b = x.chunk(2, -1)
            log_s, shift = self.net(a).chunk(2, -1)
            s = torch.sigmoid(log_s + 2)
            return torch.cat([a, (b + shift) * s], -1), logdet + torch.sum(torch.log(s).view(len(x), -1), 1)

    class Flows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Flow(), Flow(), Flow()])

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logdet = torch.zeros(len(x))
            for block in self.blocks:
                x, logdet = block(x, logdet)
            return x, logdet

    model = Flows()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    t.writes_within_step("loc", "scale")
    t.apply(model, optimizer)
    for step in range(5):
        x = tokens(step)[0] + torch.rand(4, 6, WIDTH) / 32
        if step == 0:
            with torch.no_grad():
                model(x)
            t.end_step()
            continue
        z, logdet = model(x)
        logdet = logdet.mean()
        loss = -(logdet - 0.5 * z.square().sum((1, 2)).mean()) / (math.log(2) * 48)
        model.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 1e-2
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "a U of blocks by recursion, a critic on pairs, flags of gradients turned by a helper, rates falling linearly (pix2pix)",
    only=EXACT,
)
def pairs_of_images(t: Trial) -> None:
    class Skip(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            inner = [Skip(depth - 1)] if depth else []
            down, up = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(6 if depth else 3, 3, 3, padding=1)
            self.model = nn.Sequential(nn.LeakyReLU(0.2), down, *inner, nn.ReLU(), up, nn.Dropout(0.3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, self.model(x)], 1)

    class Generator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(Skip(1))
            self.out = nn.Conv2d(6, 3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.out(self.blocks(x)))

    class Judge(Images):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(6, 3, 1)

    g, d = Generator(), Judge()
    of_g, of_d = (torch.optim.Adam(m.parameters(), lr=1e-2, betas=(0.5, 0.999)) for m in (g, d))
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda e: 1.0 - max(0, e - 1) / 4) for o in (of_g, of_d)]
    t.track(d)
    t.apply(g, of_g)
    t.apply(d, of_d)
    for step in range(4):
        a = images(step)[0]
        b = a.flip(3)
        fake = g(a)
        for p in d.parameters():
            p.requires_grad = True
        of_d.zero_grad()
        on_fake = d(torch.cat((a, fake), 1).detach()).square().mean()
        on_real = (d(torch.cat((a, b), 1)) - 1).square().mean()
        ((on_fake + on_real) * 0.5).backward()
        of_d.step()
        for p in d.parameters():
            p.requires_grad = False
        of_g.zero_grad()
        ((d(torch.cat((a, fake), 1)) - 1).square().mean() + functional.l1_loss(fake, b) * 10).backward()
        of_g.step()
        for schedule in schedules:
            schedule.step()
        t.note("fake", fake)
        t.end_step()


@attack(
    "recomputation",
    "branches are shaken by random shares in the forward and by others in the backward pass of a function (shake-shake)",
)
def shaken_branches(t: Trial) -> None:
    class Shake(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, training: bool) -> torch.Tensor:
            share = torch.rand(a.size(0)).view(-1, 1, 1).to(a.dtype) if training else 0.5
            return share * a + (1 - share) * b

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            share = torch.rand(gradients[0].size(0)).view(-1, 1, 1).to(gradients[0].dtype)
            return share * gradients[0], (1 - share) * gradients[0], None

    class Shaken(Block):
        def __init__(self) -> None:
            super().__init__()
            self.other = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + Shake.apply(self.inner(x), self.other.inner(x), self.training)

    train(t, Net([Shaken(), Shaken()]), num_steps=4)


@attack(
    "gradients",
    "layers of mixed manifolds: which layer is mixed is drawn by Python, with whom by torch, lengths of shares by numpy",
    only=EXACT,
)
def mixed_in_a_drawn_layer(t: Trial) -> None:
    import numpy as np

    class Manifold(Net):
        def __init__(self) -> None:
            super().__init__([Block() for _ in range(3)], sequential=False)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            layer, share = random.randint(0, 3), float(np.random.beta(2.0, 2.0))
            order = torch.randperm(len(x))
            x = self.stem(x)
            for number, block in enumerate([*self.blocks, None]):
                if number == layer:
                    x = share * x + (1 - share) * x[order]
                x = x if block is None else block(x)
            logits = self.head(x)
            return share * self.loss(logits, y) + (1 - share) * self.loss(logits, y[order])

    model = Manifold()
    train(t, model, sgd(model), num_steps=6)
