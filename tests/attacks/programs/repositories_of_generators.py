"""Generators as their repositories train them: phases of a style generator, unrolled and relativistic critics, denoisers, flows, importance weights."""

import copy
import math
from typing import Any

import torch
from tests.attacks.models import NUM_CLASSES, WIDTH, Block, Images, Net, adamw, images, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


class _Critic(Net):
    """One number for each example."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x)).mean((1, 2))[:, None]


class _Synthesis(Net):
    def __init__(self) -> None:
        super().__init__()
        self.mapping = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(NUM_CLASSES, WIDTH)
        self.strength = nn.Parameter(torch.zeros([]))
        self.register_buffer("w_avg", torch.zeros(WIDTH))

    def styles(self, z: torch.Tensor) -> torch.Tensor:
        z = z * (z.square().mean(dim=1, keepdim=True) + 1e-8).rsqrt()
        w = functional.leaky_relu(self.mapping(z), 0.2)
        if self.training:
            self.w_avg.copy_(w.detach().mean(dim=0).lerp(self.w_avg, 0.9))
        return w

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(len(w), 6, 1) * self.strength
        return self.out(self.head(self.features(w + noise)))


@attack(
    "second order",
    "phases of a style generator: styles mixed, an average of styles in its forward, lazy penalties, all gradients as one vector (StyleGAN2)",
    only=EXACT,
)
def style_phases(t: Trial) -> None:
    g, d = _Synthesis(), _Critic()
    average = copy.deepcopy(g).eval().requires_grad_(False)
    made = {}
    for name, module, every in (("g", g, 2), ("d", d, 2)):
        ratio = every / (every + 1)
        made[name] = torch.optim.Adam(module.parameters(), lr=1e-2 * ratio, betas=(0.0, 0.99**ratio))
    t.track(average)
    t.apply(g, made["g"])
    t.apply(d, made["d"])
    length_mean = torch.zeros([])
    phases = [("g", "main", 1), ("g", "penalty", 2), ("d", "main", 1), ("d", "penalty", 2)]
    for module in (g, d):
        module.requires_grad_(False)
    for step in range(4):
        real = tokens(step)[0]
        for name, phase, every in phases:
            if step % every != 0:
                continue
            module, optimizer = {"g": g, "d": d}[name], made[name]
            optimizer.zero_grad(set_to_none=True)
            module.requires_grad_(True)
            z = torch.randn(4, WIDTH)
            if name == "g":
                w = g.styles(z).unsqueeze(1).repeat(1, 6, 1)
                cutoff = torch.empty([], dtype=torch.int64).random_(1, 6)
                cutoff = torch.where(torch.rand([]) < 0.9, cutoff, torch.full_like(cutoff, 6))
                w = torch.cat(
                    [w[:, : int(cutoff)], g.styles(torch.randn_like(z)).unsqueeze(1).repeat(1, 6, 1)[:, int(cutoff) :]],
                    1,
                )
                fake = g(w)
                if phase == "main":
                    functional.softplus(-d(fake)).mean().mul(1).backward()
                else:
                    noise = torch.randn_like(fake) / math.sqrt(fake.shape[1])
                    (grads,) = torch.autograd.grad([(fake * noise).sum()], [w], create_graph=True, only_inputs=True)
                    lengths = grads.square().sum(2).mean(1).sqrt()
                    mean = length_mean.lerp(lengths.mean(), 0.1)
                    length_mean.copy_(mean.detach())
                    ((lengths - mean).square() * 2 + fake[:, 0, 0] * 0).mean().mul(every).backward()
            else:
                if phase == "main":
                    fake = g(g.styles(z).unsqueeze(1).repeat(1, 6, 1))
                    functional.softplus(d(fake)).mean().mul(1).backward()
                seen = real.detach().requires_grad_(phase == "penalty")
                logits = d(seen)
                loss = functional.softplus(-logits) if phase == "main" else 0
                penalty: Any = 0
                if phase == "penalty":
                    (grads,) = torch.autograd.grad([logits.sum()], [seen], create_graph=True, only_inputs=True)
                    penalty = grads.square().sum([1, 2]) * 0.5
                (logits * 0 + loss + (penalty[:, None] if phase == "penalty" else 0)).mean().mul(every).backward()
            module.requires_grad_(False)
            params = [p for p in module.parameters() if p.grad is not None]
            flat = torch.cat([p.grad.flatten() for p in params])
            torch.nan_to_num(flat, nan=0, posinf=1e5, neginf=-1e5, out=flat)
            for p, grad in zip(params, flat.split([p.numel() for p in params]), strict=True):
                p.grad = grad.reshape(p.shape)
            optimizer.step()
            t.end_step()
        with torch.no_grad():
            for a, p in zip(average.parameters(), g.parameters(), strict=True):
                a.copy_(p.lerp(a, 0.9))
            for a, p in zip(average.buffers(), g.buffers(), strict=True):
                a.copy_(p)
        t.note("lengths", length_mean)
        t.end_step()


class _Conditional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain, self.bias = nn.Linear(4, WIDTH, bias=False), nn.Linear(4, WIDTH, bias=False)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        flat = x.transpose(1, 2)
        normed = functional.batch_norm(flat, self.mean, self.var, None, None, self.training, 0.1, 1e-4).transpose(1, 2)
        return x + self.layer(torch.relu(normed * (1 + self.gain(y))[:, None] + self.bias(y)[:, None]))


@attack(
    "gradients",
    "an orthogonal penalty is added to gradients by hand, several critic steps of parts summed, statistics stand at the end (BigGAN)",
    only=EXACT,
)
def orthogonal_by_gradients(t: Trial) -> None:
    class Generator(Net):
        def __init__(self) -> None:
            super().__init__([_Conditional(), _Conditional()], sequential=False)
            self.shared, self.out = nn.Embedding(NUM_CLASSES, 4), nn.Linear(NUM_CLASSES, WIDTH)

        def forward(self, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x, y = self.stem(z), self.shared(y)
            for block in self.blocks:
                x = block(x, y)
            return torch.tanh(self.out(self.head(x)))

    g, d = Generator(), _Critic()
    for module in d.modules():
        if isinstance(module, nn.Linear):
            nn.utils.spectral_norm(module, eps=1e-6)
    of_g, of_d = (
        torch.optim.Adam(g.parameters(), 1e-2, (0.0, 0.999)),
        torch.optim.Adam(d.parameters(), 2e-2, (0.0, 0.999)),
    )
    average = {k: v.clone() for k, v in g.state_dict().items()}
    t.apply(g, of_g)
    t.apply(d, of_d)

    def toggle(on_g: bool) -> None:
        for module, on in ((g, on_g), (d, not on_g)):
            for p in module.parameters():
                p.requires_grad = on

    for step in range(3):
        g.train()
        toggle(False)
        for part in range(2):
            of_d.zero_grad()
            for _ in range(2):
                x, y = tokens(2 * step + part)
                with torch.set_grad_enabled(False):
                    fake = g(torch.randn_like(x), y[:, 0])
                (torch.mean(torch.relu(1.0 + d(fake))) / 2 + torch.mean(torch.relu(1.0 - d(x))) / 2).backward()
            of_d.step()
        toggle(True)
        of_g.zero_grad()
        for _ in range(2):
            x, y = tokens(step)
            (-torch.mean(d(g(torch.randn_like(x), y[:, 0]))) / 2).backward()
        with torch.no_grad():
            for p in g.parameters():
                if len(p.shape) < 2 or any(p is each for each in g.shared.parameters()):
                    continue
                w = p.view(p.shape[0], -1)
                grad = 2 * torch.mm(torch.mm(w, w.t()) * (1.0 - torch.eye(w.shape[0])), w)
                p.grad.data += 1e-2 * grad.view(p.shape)
        of_g.step()
        with torch.no_grad():
            for key, value in g.state_dict().items():
                average[key].data.copy_(average[key].data * 0.9 + value.data * 0.1)
        t.note("average", average)
        t.end_step()
    for module in g.modules():
        if isinstance(module, _Conditional):
            module.mean.zero_()
    with torch.no_grad():
        for number in range(3):
            x, y = tokens(number)
            g(torch.randn_like(x), y[:, 0])
    t.end_step()


@attack(
    "second order",
    "the critic's own steps are unrolled with the graph kept, then its state is put back from a copy (unrolled GAN)",
)
def unrolled_critic(t: Trial) -> None:
    class Maker(Net):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(NUM_CLASSES, WIDTH)

        def forward(self, z: torch.Tensor) -> torch.Tensor:
            return self.out(self.head(self.features(z)))

    g, d = Maker(), _Critic()
    of_g, of_d = torch.optim.Adam(g.parameters(), 1e-2), torch.optim.SGD(d.parameters(), 1e-1)
    t.apply(g, of_g)
    t.apply(d, of_d)
    bce = nn.BCEWithLogitsLoss()
    t.writes_within_step("weight", "bias")
    for step in range(3):
        real = tokens(step)[0]
        with torch.no_grad():
            fake = g(torch.randn_like(real))
        of_d.zero_grad()
        (bce(d(real), torch.ones(4, 1)) + bce(d(fake), torch.zeros(4, 1))).backward()
        of_d.step()
        of_g.zero_grad()
        backup = copy.deepcopy(d.state_dict())
        for _ in range(2):
            of_d.zero_grad()
            with torch.no_grad():
                fake = g(torch.randn_like(real))
            (bce(d(real), torch.ones(4, 1)) + bce(d(fake), torch.zeros(4, 1))).backward(create_graph=True)
            of_d.step()
        loss = bce(d(g(torch.randn_like(real))), torch.ones(4, 1))
        loss.backward()
        of_g.step()
        d.load_state_dict(backup)
        for p in d.parameters():
            p.grad = None
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "a relativistic average critic and features of a frozen net, losses in one backward pass, weights blended after (ESRGAN)",
    only=EXACT,
)
def relativistic(t: Trial) -> None:
    class Residual(Images):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            return x + 0.2 * self.chain(x)[:, :3]

    g, d = Residual(), Images()
    features = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True)).eval()
    for p in features.parameters():
        p.requires_grad = False
    of_g, of_d = torch.optim.Adam(g.parameters(), 1e-2), torch.optim.Adam(d.parameters(), 1e-2)
    t.track(features)
    t.apply(g, of_g)
    t.apply(d, of_d)
    bce = nn.BCEWithLogitsLoss()
    for step in range(3):
        real = images(step)[0]
        low = functional.interpolate(functional.avg_pool2d(real, 2), scale_factor=2)
        for p in d.parameters():
            p.requires_grad = False
        of_g.zero_grad()
        fake = g(low)
        a, b = d(real).detach(), d(fake)
        adversarial = (bce(a - b.mean(0, True), torch.zeros_like(a)) + bce(b - a.mean(0, True), torch.ones_like(b))) / 2
        perceived = functional.l1_loss(features(fake), features(real).detach())
        (functional.l1_loss(fake, real) + perceived + 5e-2 * adversarial).backward()
        of_g.step()
        for p in d.parameters():
            p.requires_grad = True
        of_d.zero_grad()
        b = d(fake).detach()
        a = d(real)
        (bce(a - torch.mean(b), torch.ones_like(a)) * 0.5).backward()
        b = d(fake.detach())
        (bce(b - torch.mean(a.detach()), torch.zeros_like(b)) * 0.5).backward()
        of_d.step()
        t.note("fake", fake)
        t.end_step()


@attack(
    "gradients",
    "losses weighed by noise, accumulation, gradients cleaned with out=, a ramp of the rate, half-life of the average (EDM)",
    only=EXACT,
)
def preconditioned_denoiser(t: Trial) -> None:
    class Denoiser(Net):
        def __init__(self) -> None:
            super().__init__()
            self.level, self.out = nn.Linear(1, WIDTH), nn.Linear(NUM_CLASSES, WIDTH)
            nn.init.zeros_(self.out.weight)

        def forward(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
            skip = 0.25 / (sigma**2 + 0.25)
            out = sigma * 0.5 / (sigma**2 + 0.25).sqrt()
            given = x / (0.25 + sigma**2).sqrt()
            return skip * x + out * self.out(self.head(self.features(given + self.level(sigma.log() / 4))))

    model = Denoiser()
    ema = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    t.track(ema)
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad(set_to_none=True)
        for part in range(2):
            y = tokens(2 * step + part)[0]
            sigma = (torch.randn([len(y), 1, 1]) * 1.2 - 1.2).exp()
            weight = (sigma**2 + 0.25) / (sigma * 0.5) ** 2
            loss = weight * (model(y + torch.randn_like(y) * sigma, sigma) - y) ** 2
            loss.sum().mul(1 / 192).backward()
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(step / 2, 1)
        for p in model.parameters():
            if p.grad is not None:
                torch.nan_to_num(p.grad, nan=0, posinf=1e5, neginf=-1e5, out=p.grad)
        optimizer.step()
        beta = 0.5 ** (8 / max(min(16, (step + 1) * 4), 1e-8))
        for e, p in zip(ema.parameters(), model.parameters(), strict=True):
            e.copy_(p.detach().lerp(e, beta))
        t.end_step()


@attack(
    "recomputation",
    "the random state before one forward is put back for the target's, so that dropout is the same; steps by a growing count (consistency)",
    only=EXACT,
)
def consistency(t: Trial) -> None:
    class Wet(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + functional.dropout(self.inner(x), 0.2, self.training)

    class Denoiser(Net):
        def __init__(self) -> None:
            super().__init__([Wet(), Wet()])
            self.out = nn.Linear(NUM_CLASSES, WIDTH)

        def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
            return x / (1 + time) + time * self.out(self.head(self.features(x)))

    model = Denoiser()
    target, ema = copy.deepcopy(model), copy.deepcopy(model)
    for net in (target, ema):
        net.requires_grad_(False).train()
    optimizer = torch.optim.RAdam(model.parameters(), lr=1e-2)
    t.track(target)
    t.track(ema)
    t.apply(model, optimizer)
    for step in range(4):
        x = tokens(step)[0]
        scales = math.ceil(math.sqrt((step / 4) * (4**2 - 2**2) + 2**2))
        times = torch.linspace(0.1, 2.0, scales + 1)
        indices = torch.randint(0, scales, (len(x),))
        t1, t2 = times[indices + 1][:, None, None], times[indices][:, None, None]
        noise = torch.randn_like(x)
        state = torch.get_rng_state()
        seen = model(x + noise * t1, t1)
        torch.set_rng_state(state)
        with torch.no_grad():
            aimed = target(x + noise * t2, t2).detach()
        loss = functional.smooth_l1_loss(seen, aimed)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        decay = math.exp(2 * math.log(0.9) / scales)
        with torch.no_grad():
            torch._foreach_lerp_(list(target.parameters()), list(model.parameters()), 1 - decay)
            for e, p in zip(ema.parameters(), model.parameters(), strict=True):
                e.mul_(0.9).add_(p, alpha=0.1)
        t.note("loss", loss)
        t.end_step()


@attack(
    "parts",
    "blocks are modulated by time and label that are dropped by torch.rand, all gates zero at first, variance learned beside (DiT)",
    only=EXACT,
)
def modulated_by_time(t: Trial) -> None:
    class Modulated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
            self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
            self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 3 * WIDTH))
            nn.init.zeros_(self.modulation[-1].weight)
            nn.init.zeros_(self.modulation[-1].bias)

        def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
            shift, scale, gate = self.modulation(c).chunk(3, dim=1)
            y = self.norm(x) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)
            return x + gate.unsqueeze(1) * self.narrow(functional.gelu(self.wide(y), approximate="tanh"))

    class Transformer(Net):
        def __init__(self) -> None:
            super().__init__([Modulated(), Modulated()], sequential=False)
            self.labels, self.time = nn.Embedding(NUM_CLASSES + 1, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.head = nn.Linear(WIDTH, 2 * WIDTH)
            self.places = nn.Parameter(torch.zeros(1, 6, WIDTH), requires_grad=False)
            self.places.data.copy_(torch.sin(torch.arange(48.0).view(1, 6, WIDTH)))

        def forward(self, x: torch.Tensor, time: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x = self.stem(x) + self.places
            if self.training:
                y = torch.where(torch.rand(y.shape[0]) < 0.3, NUM_CLASSES, y)
            waves = torch.exp(-torch.arange(4) / 4)[None] * time[:, None]
            c = self.time(torch.cat([torch.cos(waves), torch.sin(waves)], dim=-1)) + self.labels(y)
            for block in self.blocks:
                x = block(x, c)
            return self.head(x)

    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        time = torch.randint(0, 10, (len(x),))
        noise = torch.randn_like(x)
        share = (1 - time / 10).to(x.dtype)[:, None, None]
        seen = share.sqrt() * x + (1 - share).sqrt() * noise
        out, variance = torch.split(model(seen, time.to(x.dtype), y[:, 0]), WIDTH, dim=-1)
        frozen = torch.cat([out.detach(), variance], dim=-1)
        mean, spread = torch.split(frozen, WIDTH, dim=-1)
        bound = 0.5 * ((x - seen + 0.1 * mean) ** 2 * torch.exp(-spread) + spread).mean((1, 2))
        loss = (((noise - out) ** 2).mean((1, 2)) + bound / 1000).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "a locked copy and a trained one with layers that start at zero, whose outputs are added on the way (ControlNet)",
)
def zero_layers(t: Trial) -> None:
    class Controlled(nn.Module):
        returns_loss = True

        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.ModuleList([Block(), Block()])
            self.trained = copy.deepcopy(self.blocks)
            self.zeros = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
            for zero in self.zeros:
                for p in zero.parameters():
                    p.detach().zero_()
            self.head = nn.Linear(WIDTH, NUM_CLASSES)
            for p in [*self.stem.parameters(), *self.blocks.parameters(), *self.head.parameters()]:
                p.requires_grad = False

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            hint, x = x.flip(1), self.stem(x)
            with torch.no_grad():
                start = x
            control = start + hint
            for block, copied, zero in zip(self.blocks, self.trained, self.zeros, strict=True):
                control = copied(control)
                x = block(x) + zero(control)
            return functional.cross_entropy(self.head(x).flatten(0, 1), y.flatten())

    model = Controlled()
    train(t, model, adamw(model), num_steps=4)
