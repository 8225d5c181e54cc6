"""Agents and robots as their repositories train them: twin critics, world models, returns that are normalised, gradients scaled by hooks, sequences of decisions."""

import copy
from typing import Any

import torch
from tests.attacks.models import NUM_CLASSES, WIDTH, Block, Net, adamw, tokens
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


class _Mean(Net):
    """The head's answer for the mean of the features."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).mean(1))


class _Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH + NUM_CLASSES, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(torch.cat([x.mean(1), action], -1))))


@attack(
    "gradients",
    "twin critics each step, the actor and all targets every second, noise clipped on the target's action (TD3)",
    only=EXACT,
)
def twin_critics(t: Trial) -> None:
    actor, one, two = _Mean(), _Critic(), _Critic()
    targets = [copy.deepcopy(each).requires_grad_(False) for each in (actor, one, two)]
    of_actor = torch.optim.Adam(actor.parameters(), lr=1e-2)
    of_critic = torch.optim.Adam([*one.parameters(), *two.parameters()], lr=1e-2)
    for each in (two, *targets):
        t.track(each)
    t.apply(actor, of_actor)
    t.apply(one, of_critic)
    for step in range(6):
        x, after = tokens(step)[0], tokens(step + 1)[0]
        with torch.no_grad():
            action = torch.tanh(actor(x)) + 0.1 * torch.randn(4, NUM_CLASSES)
            noise = (torch.randn_like(action) * 0.2).clamp(-0.5, 0.5)
            following = (torch.tanh(targets[0](after)) + noise).clamp(-1, 1)
            aimed = x.sum((1, 2))[:, None] / 10 + 0.9 * torch.min(
                targets[1](after, following), targets[2](after, following)
            )
        loss = functional.mse_loss(one(x, action), aimed) + functional.mse_loss(two(x, action), aimed)
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
        t.end_step()
        if step % 2 == 0:
            of_actor.zero_grad()
            (-one(x, torch.tanh(actor(x))).mean()).backward()
            of_actor.step()
            for target, net in zip(targets, (actor, one, two), strict=True):
                for p, q in zip(net.parameters(), target.parameters(), strict=True):
                    q.data.copy_(0.1 * p.data + 0.9 * q.data)
        t.note("loss", loss)
        t.end_step()


def _symlog(x: torch.Tensor) -> torch.Tensor:
    return torch.sign(x) * torch.log(torch.abs(x) + 1.0)


class _World(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.cell = nn.Linear(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head, self.decoder, self.reward = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def drawn(self, logits: torch.Tensor) -> torch.Tensor:
        shares = 0.99 * logits.view(-1, 2, 4).softmax(-1) + 0.01 / 4
        choice = torch.distributions.OneHotCategorical(probs=shares).sample()
        return (choice + shares - shares.detach()).flatten(1)

    def step(self, z: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.cell(z, h)
        return h, self.head(self.blocks(h))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.zeros(len(x), WIDTH)
        z, loss, states = torch.zeros(len(x), WIDTH), torch.zeros(()), []
        for i in range(x.shape[1]):
            h, prior = self.step(z, h)
            posterior = self.blocks(self.stem(_symlog(x[:, i])) + h)
            z = self.drawn(posterior)
            p, q = (torch.log_softmax(each.view(-1, 2, 4), -1) for each in (posterior, prior))
            dynamic = (p.detach().exp() * (p.detach() - q)).sum((-1, -2)).mean().clamp(min=0.3)
            represented = (p.exp() * (p - q.detach())).sum((-1, -2)).mean().clamp(min=0.3)
            loss = loss + 0.5 * dynamic + 0.1 * represented + (self.decoder(h + z) - _symlog(x[:, i])).square().mean()
            loss = loss + (self.reward(h)[:, 0] - _symlog(x[:, i].sum(-1))).square().mean()
            states.append((h + z).detach())
        return loss / x.shape[1], torch.cat(states)


@attack(
    "gradients",
    "a world model, an actor and a critic: straight-through classes mixed with uniform ones, symlog, returns scaled by a running quantile",
    only=EXACT,
)
def world_model(t: Trial) -> None:
    world = _World()
    actor, critic = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
    slow = copy.deepcopy(critic).requires_grad_(False)
    made = [torch.optim.Adam(m.parameters(), lr=1e-2, eps=1e-5) for m in (world, actor, critic)]
    for each in (actor, critic, slow):
        t.track(each)
    t.apply(world, made[0])
    bounds = torch.zeros(2)
    for step in range(3):
        loss, states = world(tokens(step)[0])
        made[0].zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(world.parameters(), 10.0)
        made[0].step()
        for p in world.parameters():
            p.requires_grad = False
        h, z = states, states
        rewards, logged, values, entropies = [], [], [], []
        for _ in range(3):
            shares = actor(h).softmax(-1)
            action = torch.distributions.OneHotCategorical(probs=shares.detach()).sample()
            logged.append((action * shares.log()).sum(-1))
            entropies.append(-(shares * shares.log()).sum(-1))
            with torch.no_grad():
                values.append(slow(h)[:, 0])
                h, logits = world.step(z + action, h)
                z = world.drawn(logits)
                rewards.append(world.reward(h)[:, 0])
        returns, last = [], values[-1]
        for reward, value in zip(reversed(rewards), reversed(values), strict=True):
            last = reward + 0.9 * (0.1 * value + 0.9 * last)
            returns.insert(0, last)
        found = torch.stack(returns)
        quantiles = torch.quantile(found.detach(), torch.tensor([0.05, 0.95], dtype=found.dtype))
        bounds[:] = 0.9 * bounds + 0.1 * quantiles
        scale = torch.clip(bounds[1] - bounds[0], min=1.0)
        advantage = (found - torch.stack(values)) / scale
        of_actor = -(torch.stack(logged) * advantage.detach() + 3e-4 * torch.stack(entropies)).mean()
        of_critic = (critic(states)[:, 0] - found[0].detach()).square().mean()
        of_critic = of_critic + (critic(states)[:, 0] - slow(states)[:, 0].detach()).square().mean()
        for optimizer, value, module in ((made[1], of_actor, actor), (made[2], of_critic, critic)):
            optimizer.zero_grad()
            value.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
        for p in world.parameters():
            p.requires_grad = True
        with torch.no_grad():
            for s, c in zip(slow.parameters(), critic.parameters(), strict=True):
                s.data = 0.2 * c.data + 0.8 * s.data
        t.note("bounds", bounds)
        t.end_step()


@attack(
    "recomputation",
    "a model of dynamics is unrolled, hidden states scaled to a range, their gradients halved by hooks at each step (MuZero)",
    only=EXACT,
)
def unrolled_dynamics(t: Trial) -> None:
    class Dynamics(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.Sequential(Block(), Block())
            self.head, self.value = nn.Linear(WIDTH, NUM_CLASSES), nn.Linear(WIDTH, 1)

        def scaled(self, h: torch.Tensor) -> torch.Tensor:
            low, high = h.min(1, keepdim=True)[0], h.max(1, keepdim=True)[0]
            span = high - low
            span[span < 1e-5] += 1e-5
            return (h - low) / span

        def forward(self, x: torch.Tensor, actions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
            h = self.scaled(self.stem(x).mean(1))
            found = [(self.value(h), self.head(h))]
            for i in range(actions.shape[1]):
                h = self.scaled(self.blocks(h + functional.one_hot(actions[:, i], WIDTH)))
                if h.requires_grad:
                    h.register_hook(lambda grad: grad * 0.5)
                found.append((self.value(h), self.head(h)))
            return found

    model = Dynamics()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-4)
    t.apply(model, optimizer)
    priorities = torch.ones(4)
    for step in range(4):
        x, y = tokens(step)
        losses = torch.zeros(4)
        for i, (value, policy) in enumerate(model(x, y[:, :3])):
            now = (value[:, 0] - x[:, i].sum(-1) / 5).square() * 0.25
            now = now + functional.cross_entropy(policy, y[:, i], reduction="none")
            if i and now.requires_grad:
                now.register_hook(lambda grad: grad / 3)
            losses = losses + now
        with torch.no_grad():
            priorities = 0.5 * priorities + 0.5 * losses.detach().abs() ** 0.5
        loss = (losses / priorities).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "a predictor against a random net gives a bonus, divided by a running spread of returns kept in numpy; a drawn mask of examples (RND)",
    only=EXACT,
)
def random_network(t: Trial) -> None:
    import numpy as np

    class Running:
        def __init__(self) -> None:
            self.mean, self.var, self.count = np.zeros(()), np.ones(()), 1e-4

        def update(self, values: Any) -> None:
            mean, var, count = np.mean(values), np.var(values), len(values)
            delta, total = mean - self.mean, self.count + count
            m2 = self.var * self.count + var * count + np.square(delta) * self.count * count / total
            self.mean, self.var, self.count = self.mean + delta * count / total, m2 / total, total

    policy, predictor = _Mean(), _Mean()
    target = _Mean().requires_grad_(False)
    optimizer = torch.optim.Adam([*policy.parameters(), *predictor.parameters()], lr=1e-2)
    t.track(predictor)
    t.track(target)
    t.apply(policy, optimizer)
    running = Running()
    for step in range(4):
        x, y = tokens(step)
        with torch.no_grad():
            bonus = (target(x) - predictor(x)).pow(2).sum(1) / 2
        running.update(bonus.numpy())
        reward = bonus / float(np.sqrt(running.var))
        with torch.no_grad():
            old = torch.log_softmax(policy(x), -1).gather(1, y[:, :1])[:, 0]
        for part in np.array_split(np.random.permutation(4), 2):
            chosen = torch.from_numpy(part)
            logits = torch.log_softmax(policy(x[chosen]), -1)
            ratio = torch.exp(logits.gather(1, y[chosen, :1])[:, 0] - old[chosen])
            advantage = reward[chosen] - reward.mean()
            surrogate = -torch.min(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage).mean()
            forward = (predictor(x[chosen]) - target(x[chosen]).detach()).pow(2).mean(-1)
            mask = (torch.rand(len(forward)) < 0.5).to(forward.dtype)
            loss = (
                surrogate
                + (forward * mask).sum() / torch.max(mask.sum(), torch.ones(()))
                - 0.01 * logits.exp().mul(logits).sum(-1).mean()
            )
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
        t.note("spread", float(running.var))
        t.end_step()


@attack(
    "parts",
    "returns, states and actions are woven into one sequence and taken apart again, padding masked by its own attention (decision transformer)",
    only=EXACT,
)
def sequences_of_decisions(t: Trial) -> None:
    class Attending(Block):
        is_attention = True

        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
            scores = q @ k.transpose(-2, -1) / WIDTH**0.5
            length = x.shape[1]
            causal = torch.tril(torch.ones(length, length)).bool()
            scores = torch.where(causal, scores, torch.tensor(-1e4, dtype=scores.dtype))
            scores = scores + (1.0 - mask[:, None, :]) * -10000.0
            x = x + scores.softmax(-1) @ v
            return x + self.inner(x)

    class Deciding(Net):
        def __init__(self) -> None:
            super().__init__([Attending(), Attending()], sequential=False)
            self.of_return, self.of_action = nn.Linear(1, WIDTH), nn.Embedding(NUM_CLASSES, WIDTH)
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x: torch.Tensor, y: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            parts = (self.of_return(returns), self.stem(x), self.of_action(y))
            stacked = torch.stack(parts, dim=1).permute(0, 2, 1, 3).reshape(len(x), 3 * x.shape[1], WIDTH)
            seen = torch.stack((mask, mask, mask), dim=1).permute(0, 2, 1).reshape(len(x), -1)
            stacked = self.norm(stacked)
            for block in self.blocks:
                stacked = block(stacked, seen)
            found = stacked.reshape(len(x), x.shape[1], 3, WIDTH).permute(0, 2, 1, 3)
            logits = self.head(found[:, 1])
            return functional.cross_entropy(
                logits.reshape(-1, NUM_CLASSES)[mask.reshape(-1) > 0], y.reshape(-1)[mask.reshape(-1) > 0]
            )

    model = Deciding()
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / 3, 1))
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        returns = x.sum(-1, keepdim=True).flip(1).cumsum(1).flip(1)
        mask = (torch.arange(6) >= torch.tensor([0, 2, 1, 3])[:, None]).to(x.dtype)
        loss = model(x, y, returns, mask)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        schedule.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "values by expectile, advantages exponentiated and clamped, three optimizers and a schedule for one of them (IQL)",
    only=EXACT,
)
def expectiles(t: Trial) -> None:
    policy, value, critic = _Mean(), _Mean(), _Critic()
    target = copy.deepcopy(critic).requires_grad_(False)
    made = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (value, critic, policy)]
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(made[2], 5)
    for each in (critic, target):
        t.track(each)
    t.apply(policy, made[2])
    t.apply(value, made[0])
    for step in range(4):
        x, y = tokens(step)
        action = functional.one_hot(y[:, 0], NUM_CLASSES).to(x.dtype)
        with torch.no_grad():
            aimed, following = target(x, action)[:, 0], value(tokens(step + 1)[0])[:, 0]
        v = value(x)[:, 0]
        advantage = aimed - v
        of_value = torch.mean(torch.abs(0.7 - (advantage < 0).to(x.dtype)) * advantage**2)
        made[0].zero_grad(set_to_none=True)
        of_value.backward()
        made[0].step()
        goals = x.sum((1, 2)) / 10 + 0.9 * following.detach()
        of_critic = functional.mse_loss(critic(x, action)[:, 0], goals)
        made[1].zero_grad(set_to_none=True)
        of_critic.backward()
        made[1].step()
        for p, q in zip(critic.parameters(), target.parameters(), strict=True):
            q.data.mul_(0.9).add_(p.data, alpha=0.1)
        weights = torch.exp(3.0 * advantage.detach()).clamp(max=100.0)
        of_policy = torch.mean(weights * functional.cross_entropy(policy(x), y[:, 0], reduction="none"))
        made[2].zero_grad(set_to_none=True)
        of_policy.backward()
        made[2].step()
        schedule.step()
        t.note("losses", torch.stack([of_value, of_critic, of_policy]))
        t.end_step()


@attack(
    "changes",
    "an encoder of a query and one of keys share their convolution's weights by assignment, features detached for the actor (CURL)",
    only=EXACT,
)
def tied_encoders(t: Trial) -> None:
    actor, critic = _Mean(), _Mean()
    slow = copy.deepcopy(critic).requires_grad_(False)
    for mine, theirs in zip(actor.blocks, critic.blocks, strict=True):
        for name in ("wide", "narrow"):
            getattr(mine, name).weight = getattr(theirs, name).weight
            getattr(mine, name).bias = getattr(theirs, name).bias
    bilinear = nn.Parameter(torch.rand(NUM_CLASSES, NUM_CLASSES))
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-2)
    of_encoder = torch.optim.Adam([*critic.blocks.parameters(), bilinear], lr=1e-2)
    of_actor = torch.optim.Adam(actor.head.parameters(), lr=1e-2)
    t.track(slow)
    t.track(actor)
    t.apply(critic, of_critic, of_encoder)
    for step in range(4):
        x, y = tokens(step)
        of_critic.zero_grad()
        functional.mse_loss(critic(x)[:, 0], x.sum((1, 2))).backward()
        of_critic.step()
        with torch.no_grad():
            features = actor.features(x).mean(1)
        of_actor.zero_grad()
        functional.cross_entropy(actor.head(features.detach()), y[:, 0]).backward()
        of_actor.step()
        key = slow(x + 0.1).detach()
        logits = critic(x) @ (bilinear @ key.T)
        logits = logits - torch.max(logits, 1)[0][:, None]
        of_encoder.zero_grad()
        of_critic.zero_grad()
        functional.cross_entropy(logits, torch.arange(4)).backward()
        of_encoder.step()
        of_critic.step()
        for p, q in zip(critic.parameters(), slow.parameters(), strict=True):
            q.data.copy_(0.1 * p.data + 0.9 * q.data)
        t.note("bilinear", bilinear)
        t.end_step()


@attack(
    "gradients",
    "importance weights from a behaviour policy are cut (V-trace), hidden states reset by done flags within the unroll (IMPALA)",
    only=EXACT,
)
def cut_importance(t: Trial) -> None:
    class Unrolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.Sequential(Block(), Block())
            self.core = nn.LSTM(WIDTH, WIDTH, 1)
            self.head, self.baseline = nn.Linear(WIDTH, NUM_CLASSES), nn.Linear(WIDTH, 1)

        def forward(self, x: torch.Tensor, done: torch.Tensor, state: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
            x = self.blocks(self.stem(torch.flatten(x, 0, 1))).view(*x.shape[:2], WIDTH)
            found = []
            for now, ended in zip(x.unbind(), (~done).to(x.dtype).unbind(), strict=True):
                state = tuple(ended.view(1, -1, 1) * each for each in state)
                output, state = self.core(now.unsqueeze(0), state)
                found.append(output)
            x = torch.flatten(torch.cat(found), 0, 1)
            return self.head(x), self.baseline(x), state

    model = Unrolled()
    actor = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2, momentum=0, eps=0.01, alpha=0.99)
    t.track(actor)
    t.apply(model, optimizer)
    state = tuple(torch.zeros(1, 4, WIDTH) for _ in range(2))
    for step in range(4):
        x, y = tokens(step)
        x, y = x.transpose(0, 1), y.T
        done = torch.rand(6, 4) < 0.2
        with torch.no_grad():
            behaviour, _, following = actor(x, done, state)
        logits, baseline, _ = model(x, done, state)
        logits, baseline = logits.view(6, 4, -1), baseline.view(6, 4)
        behaviour = behaviour.view(6, 4, -1)

        def taken(each: torch.Tensor, chosen: torch.Tensor = y) -> torch.Tensor:
            return torch.log_softmax(each, -1).gather(-1, chosen[..., None])[..., 0]

        with torch.no_grad():
            rhos = torch.exp(taken(logits) - taken(behaviour))
            cut = torch.clamp(rhos, max=1.0)
            after = torch.cat([baseline[1:], baseline[-1:]])
            deltas = cut * (x.sum(-1) / 5 + 0.9 * (~done).to(x.dtype) * after - baseline)
            sums, last = [], torch.zeros(4)
            for i in reversed(range(6)):
                last = deltas[i] + 0.9 * cut[i] * last
                sums.append(last)
            traces = torch.stack(sums[::-1]) + baseline
        loss = -(taken(logits) * (traces - baseline.detach())).sum() + 0.5 * (traces - baseline).square().sum()
        optimizer.zero_grad()
        (loss / 24).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        actor.load_state_dict(model.state_dict())
        state = tuple(each.detach() for each in following)
        t.note("loss", loss)
        t.end_step()
