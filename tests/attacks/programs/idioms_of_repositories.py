"""Loops as repositories have them: noisy networks, replay by errors, timestep samplers, adaptation at test time, fade-ins, radiance fields."""

import copy
import random
from typing import Any

import torch
from tests.attacks.models import NUM_CLASSES, TOKENS, WIDTH, Block, Images, Net, adamw, images, sgd, tokens
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


@attack(
    "recomputation",
    "noisy linear layers hold noise in buffers, drawn anew by a method before each forward (Rainbow)",
    only=EXACT,
)
def noisy_layers(t: Trial) -> None:
    class Noisy(Block):
        def __init__(self) -> None:
            super().__init__()
            self.sigma = nn.Parameter(torch.full((WIDTH,), 0.3))
            self.register_buffer("noise", torch.zeros(WIDTH))

        def reset_noise(self) -> None:
            noise = torch.randn(WIDTH)
            self.noise.copy_(noise.sign() * noise.abs().sqrt())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x) * (1 + self.sigma * self.noise if self.training else 1.0)

    model, target = Net([Noisy(), Noisy()]), Net([Noisy(), Noisy()])
    target.load_state_dict(model.state_dict())
    optimizer = adamw(model)
    t.track(target)
    t.apply(model, optimizer)
    priorities = torch.ones(8)
    for step in range(5):
        chosen = torch.multinomial(priorities, 4)
        x, y = (torch.cat(each)[chosen] for each in zip(tokens(0), tokens(1), strict=True))
        weights = (8 * priorities[chosen] / priorities.sum()) ** -0.5
        for net in (model, target):
            for block in net.blocks:
                block.reset_noise()
        value = model(x).gather(-1, y[..., None])[..., 0]
        with torch.no_grad():
            best = model(x).argmax(-1, keepdim=True)
            goal = 0.1 + 0.9 * target(x).gather(-1, best)[..., 0]
        errors = functional.smooth_l1_loss(value, goal, reduction="none").mean(1)
        loss = (errors * weights).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        priorities[chosen] = errors.detach().to(priorities.dtype) + 1e-2
        if step % 2:
            target.load_state_dict(model.state_dict())
        t.note("loss", loss)
        t.note("priorities", priorities)
        t.end_step()


@attack(
    "gradients",
    "timesteps are drawn by how large their losses were, kept in a history by step (a loss-aware sampler)",
    only=EXACT,
)
def loss_aware_timesteps(t: Trial) -> None:
    class Denoiser(Net):
        def __init__(self) -> None:
            super().__init__()
            self.times, self.out = nn.Embedding(4, WIDTH), nn.Linear(NUM_CLASSES, WIDTH)

        def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
            return self.out(self.head(self.features(x + self.times(time)[:, None])))

    model = Denoiser()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = adamw(model)
    t.track(average)
    t.apply(model, optimizer)
    history = torch.ones(4)
    for step in range(5):
        x, _ = tokens(step)
        chances = history / history.sum()
        time = torch.multinomial(chances, len(x), replacement=True)
        noise = torch.randn_like(x)
        share = (1 - (time.to(x.dtype) + 1) / 5)[:, None, None]
        losses = functional.mse_loss(model(share * x + (1 - share) * noise, time), noise, reduction="none").mean((1, 2))
        loss = (losses / (4 * chances[time])).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history[time] = 0.5 * history[time] + 0.5 * losses.detach().square()
        decay = min(0.99, (1 + step) / (10 + step))
        for p, q in zip(model.parameters(), average.parameters(), strict=True):
            q.lerp_(p.detach(), 1 - decay)
        t.note("history", history)
        t.end_step()


@attack(
    "gradients",
    "adaptation at test time: an averaged teacher labels, and some weights go back to the source at random (CoTTA)",
    only=EXACT,
)
def adaptation_with_restores(t: Trial) -> None:
    model = Net()
    teacher = copy.deepcopy(model).requires_grad_(False)
    source = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    t.track(teacher)
    t.apply(model, optimizer)
    for step in range(5):
        x, _ = tokens(step)
        with torch.no_grad():
            sure = teacher(x).softmax(-1).max(-1).values.mean()
            labels = torch.stack([teacher(x + 0.1 * torch.randn_like(x)) for _ in range(3)]).mean(0)
            labels = labels if float(sure) < 0.9 else teacher(x)
        loss = -(labels.softmax(-1) * model(x).log_softmax(-1)).sum(-1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for p, q in zip(model.parameters(), teacher.parameters(), strict=True):
            q.data[:] = 0.9 * q[:].data[:] + 0.1 * p[:].data[:]
        for name, p in model.named_parameters():
            mask = (torch.rand(p.shape) < 0.05).to(p.dtype)
            with torch.no_grad():
                p.data = source[name] * mask + p * (1.0 - mask)
        t.note("loss", loss)
        t.end_step()


@attack("parts", "a new layer of a chain is faded in by a share that rises in each step (a progressive generator)")
def chain_faded_in(t: Trial) -> None:
    class Fading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.old, self.new = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 3, padding=1)
            self.share = 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.share == 0.0:
                return self.old(x)
            return torch.lerp(self.old(x), functional.leaky_relu(self.new(x), 0.2), min(self.share, 1.0))

    model = Images([Fading(), nn.Tanh(), nn.Conv2d(4, 4, 3, padding=1)])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(6):
        model.chain[0].share = max(0.0, (step - 1) / 3)
        loss = model(*images(step, size=4 if step < 2 else 8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "rays are sampled coarsely, then finely where the coarse net says without gradients; both nets in one loss",
    only=EXACT,
)
def coarse_and_fine(t: Trial) -> None:
    coarse, fine = Net(), Net()
    optimizer = torch.optim.Adam([*coarse.parameters(), *fine.parameters()], lr=1e-2)
    t.track(fine)
    t.apply(coarse, optimizer)
    for step in range(4):
        x, y = tokens(step)
        goal = functional.one_hot(y[:, 0], NUM_CLASSES).to(x)
        dense = coarse(x)
        shares = torch.softmax(dense.detach().sum(-1), -1)
        chosen = torch.multinomial(shares, TOKENS, replacement=True).sort(-1).values
        more = torch.gather(x, 1, chosen[..., None].expand(-1, -1, WIDTH)) + 0.05 * torch.randn_like(x)
        rendered = (functional.softplus(dense) * shares[..., None]).sum(1)
        loss = functional.mse_loss(rendered, goal) + functional.mse_loss(functional.softplus(fine(more)).mean(1), goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 1e-2 * 0.1 ** (step / 10)
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "weights are moved against the loss along each layer's norm, and back after the gradient (AWP), in later steps",
)
def adversarial_weights(t: Trial) -> None:
    model = Net()
    proxy = copy.deepcopy(model)
    of_proxy, optimizer = torch.optim.SGD(proxy.parameters(), lr=0.01), sgd(model)
    t.track(proxy)
    t.apply(model, optimizer)
    t.writes_within_step("")
    for step in range(5):
        x, y = tokens(step)
        moved = {}
        if step >= 2:
            proxy.load_state_dict(model.state_dict())
            of_proxy.zero_grad()
            (-proxy(x, y)).backward()
            of_proxy.step()
            for (name, p), q in zip(model.named_parameters(), proxy.parameters(), strict=True):
                if p.dim() > 1:
                    away = q.data - p.data
                    moved[name] = 0.02 * p.data.norm() / (away.norm() + 1e-12) * away
        with torch.no_grad():
            for name, away in moved.items():
                model.get_parameter(name).add_(away)
        loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for name, away in moved.items():
                model.get_parameter(name).sub_(away)
        t.note("loss", loss)
        t.end_step()


@attack(
    "changes",
    "when the loss has risen, the best model comes back from a deep copy with a new optimizer at half the rate",
    only=EXACT,
)
def best_comes_back_with_a_new_optimizer(t: Trial) -> None:
    model = Net()
    optimizer: Any = sgd(model, lr=1.5)
    t.apply(model, optimizer)
    best, kept, rate = float("inf"), copy.deepcopy(model.state_dict()), 1.5
    for step in range(6):
        loss = model(*tokens(step % 2))
        if float(loss) < best:
            best, kept = float(loss), copy.deepcopy(model.state_dict())
        elif step >= 2:
            model.load_state_dict(kept)
            rate /= 2
            optimizer = sgd(model, lr=rate)
            t.note("back", step)
            t.end_step()
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "a policy with values: several passes over shuffled parts, a penalty whose weight follows the divergence",
    only=EXACT,
)
def policy_with_values(t: Trial) -> None:
    class Agent(Net):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Linear(WIDTH, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.features(x)
            return self.head(x), self.value(x)[..., 0]

    model = Agent()
    optimizer = adamw(model, lr=1e-2)
    t.apply(model, optimizer)
    weight = 0.2
    for rollout in range(2):
        x, _ = tokens(rollout)
        with torch.no_grad():
            logits, values = model(x)
            chosen = torch.distributions.Categorical(logits=logits).sample()
            before = logits.log_softmax(-1)
        returns = (chosen.to(x.dtype) - 3).flip(1).cumsum(1).flip(1) / 10
        gains = returns - values
        for _ in range(2):
            order = list(range(4))
            random.shuffle(order)
            for part in (order[:2], order[2:]):
                logits, value = model(x[part])
                now = logits.log_softmax(-1)
                ratio = (now - before[part]).gather(-1, chosen[part][..., None])[..., 0].exp()
                apart = (before[part].exp() * (before[part] - now)).sum(-1).mean()
                near = values[part] + (value - values[part]).clamp(-0.2, 0.2)
                of_value = torch.maximum((value - returns[part]) ** 2, (near - returns[part]) ** 2).mean()
                loss = -(ratio * gains[part]).mean() + weight * apart + 0.5 * of_value
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                t.note("loss", loss)
                t.end_step()
        weight = weight * 2 if float(apart) > 0.02 else weight / 2


@attack(
    "parts",
    "images and texts by two towers, a learned scale that is clamped after each step, gathered features without graph (CLIP)",
)
def two_towers_with_gathered_features(t: Trial) -> None:
    class Towers(nn.Module):
        returns_loss = True

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Net(), Net()
            self.scale = nn.Parameter(torch.tensor(2.6))

        def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
            a = functional.normalize(self.first(x).mean(1), dim=-1)
            b = functional.normalize(self.second(z).mean(1), dim=-1)
            everyone = torch.cat([b, b.detach().roll(1, 0) * 0.9])
            logits = self.scale.exp() * a @ everyone.t()
            goal = torch.arange(len(a))
            back = functional.cross_entropy(logits[:, : len(a)].t(), goal)
            return (functional.cross_entropy(logits, goal) + back) / 2

    model = Towers()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(5):
        loss = model(tokens(step)[0], tokens(step + 10)[0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.scale.clamp_(0, 2.6)
        t.note("loss", loss)
        t.end_step()


@attack(
    "changes",
    "two layers drawn by Python's random train for two steps each, the others frozen, with clipping (LISA)",
    only=EXACT,
)
def layers_drawn_to_train(t: Trial) -> None:
    model = Net([Block() for _ in range(4)])
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(6):
        if step % 2 == 0:
            active = random.sample(range(4), 2)
            for number, block in enumerate(model.blocks):
                block.requires_grad_(number in active)
        loss = model(*tokens(step))
        loss.backward()
        norm = nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.5)
        optimizer.step()
        optimizer.zero_grad()
        t.note("norm", norm)
        t.end_step()
