"""Two players and several models, second orders by hand, networks of many widths: as the repositories of published methods write them."""

import itertools
import random

import torch
from tests.attacks.models import NUM_CLASSES, WIDTH, Block, Images, Net, adamw, images, sgd, tokens
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


@attack(
    "second order",
    "architecture weights by finite differences: weights moved there, back and restored between gradients (DARTS)",
)
def finite_difference_architecture(t: Trial) -> None:
    class Mixed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.choice = nn.Parameter(torch.zeros(3))

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            a = self.choice.softmax(0)
            return a[0] * super().inner(x) + a[1] * x.tanh() + a[2] * self.norm(x)

    model = Net([Mixed(), Mixed()])
    choices = [block.choice for block in model.blocks]
    weights = [p for name, p in model.named_parameters() if "choice" not in name]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    of_choices = torch.optim.Adam(choices, lr=1e-2)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step + 50)
        of_choices.zero_grad()
        optimizer.zero_grad()
        model(x, y).backward()
        vectors = [p.grad.clone() for p in weights]
        found = []
        for sign in (1.0, -2.0):
            for p, v in zip(weights, vectors, strict=True):
                p.data.add_(v, alpha=sign * 1e-3)
            found.append(torch.autograd.grad(model(*tokens(step)), choices))
        for p, v in zip(weights, vectors, strict=True):
            p.data.add_(v, alpha=1e-3)
        for c, plus, minus in zip(choices, *found, strict=True):
            c.grad.sub_((plus - minus) / 2e-3, alpha=0.1)
        of_choices.step()
        optimizer.zero_grad()
        loss = model(*tokens(step))
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 5.0)
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("second order", "examples are weighed by how a virtual step helps a clean batch (learning to reweight)")
def examples_reweighted(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)

    def losses(weights: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = torch.func.functional_call(model, weights, (x,))
        return functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view_as(y).mean(1)

    for step in range(3):
        x, y = tokens(step)
        now = dict(model.named_parameters())
        each = torch.zeros(x.shape[0], requires_grad=True)
        inner = torch.autograd.grad((losses(now, x, y) * each).sum(), tuple(now.values()), create_graph=True)
        moved = {name: p - 0.1 * g for (name, p), g in zip(now.items(), inner, strict=True)}
        (found,) = torch.autograd.grad(losses(moved, *tokens(step + 50)).mean(), each)
        weigh = functional.relu(-found)
        weigh = weigh / weigh.sum().clamp(min=1e-8)
        logits = model(x)
        loss = (
            functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view_as(y).mean(1) * weigh
        ).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "no backward pass at all: weights moved in place along seeded directions, two losses compared (MeZO)",
    only=EXACT,
)
def zeroth_order(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)

    def move(seed: int, scale: float) -> None:
        torch.manual_seed(seed)
        for p in model.parameters():
            if p.requires_grad:
                p.data.add_(torch.randn_like(p), alpha=scale)

    for step in range(6):
        if step % 3 == 2:
            # Now and then a step of first order.
            loss = model(*tokens(step))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        else:
            with torch.inference_mode():
                move(step, 1e-2)
                loss = model(*tokens(step))
                move(step, -2e-2)
                other = model(*tokens(step))
                move(step, 1e-2)
            move(step, -0.1 * float(loss - other) / 2e-2)
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "several models repel each other: all gradients are mixed by a kernel before any steps (Stein)",
    only=EXACT,
)
def stein_particles(t: Trial) -> None:
    models = [Net([Block()]) for _ in range(3)]
    optimizers = [sgd(m) for m in models]
    for model in models:
        t.track(model)
    for model, optimizer in zip(models, optimizers, strict=True):
        t.apply(model, optimizer)
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss = model(*tokens(step))
            loss.backward()
            t.note("loss", loss)
        flat = torch.stack([nn.utils.parameters_to_vector(m.parameters()).detach() for m in models])
        gradients = torch.stack([torch.cat([p.grad.flatten() for p in m.parameters()]) for m in models])
        kernel = torch.exp(-torch.cdist(flat, flat).square() / 50)
        mixed = (kernel @ gradients - (kernel.sum(1, keepdim=True) * flat - kernel @ flat) / 25) / len(models)
        for model, row in zip(models, mixed, strict=True):
            begin = 0
            for p in model.parameters():
                p.grad = row[begin : begin + p.numel()].view_as(p).clone()
                begin += p.numel()
        for optimizer in optimizers:
            optimizer.step()
        t.end_step()


@attack(
    "changes",
    "the worse of two takes the weights and the optimizer's state of the better, with another rate (populations)",
    only=EXACT,
)
def population(t: Trial) -> None:
    members = [(m, adamw(m, lr)) for m, lr in ((Net(), 1e-2), (Net(), 3e-2))]
    for model, _ in members:
        t.track(model)
    for model, optimizer in members:
        t.apply(model, optimizer)
    for step in range(6):
        found = []
        for model, optimizer in members:
            loss = model(*tokens(step))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(float(loss))
            t.note("loss", loss)
        if step % 2 == 1:
            better, worse = sorted(range(2), key=found.__getitem__)
            members[worse][0].load_state_dict(members[better][0].state_dict())
            members[worse][1].load_state_dict(members[better][1].state_dict())
            members[worse][1].param_groups[0]["lr"] *= 0.8
        t.end_step()


@attack("changes", "inner steps by the optimizer, then weights halfway back by load_state_dict, states kept (Reptile)")
def reptile(t: Trial) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.0, 0.9))
    t.apply(model, optimizer)
    for outer in range(2):
        begin = {name: value.clone() for name, value in model.state_dict().items()}
        for inner in range(3):
            loss = model(*tokens(3 * outer + inner))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            t.note("loss", loss)
            t.end_step()
        now = model.state_dict()
        model.load_state_dict({name: begin[name] + (now[name] - begin[name]) * 0.5 for name in begin})
        t.end_step()


@attack(
    "parts", "one set of weights at several widths by slices, a backward pass for each, the widest teaches (slimmable)"
)
def slimmable(t: Trial) -> None:
    class Sliced(nn.Linear):
        share = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = max(1, int(self.in_features * self.share))
            return functional.linear(x[..., :kept], self.weight[:, :kept], self.bias)

    model = Net([Block(), Block()])
    for block in model.blocks:
        block.narrow = Sliced(2 * WIDTH, WIDTH)
    model.head = Sliced(WIDTH, NUM_CLASSES)
    optimizer = sgd(model)

    def slim(share: float) -> None:
        for module in model.modules():
            if isinstance(module, Sliced):
                module.share = share

    t.apply(model, optimizer)
    for step in range(3):
        x, y = tokens(step)
        optimizer.zero_grad()
        slim(1.0)
        logits = model(x)
        loss = functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        loss.backward()
        goal = logits.detach().softmax(-1)
        for share in (0.25, 0.75):
            slim(share)
            small = model(x)
            taught = -(goal * small.log_softmax(-1)).sum(-1).mean()
            # The next width is set before the backward pass of this one.
            slim(1.0 - share)
            taught.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "two generators in one optimizer, a pool of old images, discriminators frozen while they judge (CycleGAN)",
)
def cycles_and_pools(t: Trial) -> None:
    def generator() -> nn.Module:
        model = Images([nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 3, padding=1)])
        model.head = nn.Identity()
        model.forward = lambda x: model.chain(model.stem(x))
        return model

    there, back = generator(), generator()
    judges = [Images(), Images()]
    of_generators = torch.optim.Adam(itertools.chain(there.parameters(), back.parameters()), lr=1e-2)
    of_judges = torch.optim.Adam(itertools.chain(*(j.parameters() for j in judges)), lr=1e-2)
    both = nn.ModuleDict({"there": there, "back": back})
    judged = nn.ModuleList(judges)
    t.track(both)
    t.track(judged)
    t.apply(both, of_generators)
    t.apply(judged, of_judges)
    pool: list[torch.Tensor] = []
    for step in range(3):
        x, y = images(step)[0], images(step + 9)[0]
        for judge in judges:
            judge.requires_grad_(False)
        of_generators.zero_grad()
        fake = there(x)
        loss = (
            (judges[0](fake)[:, 0] - 1).square().mean()
            + (back(fake) - x).abs().mean()
            + (there(back(y)) - y).abs().mean()
        )
        loss.backward()
        of_generators.step()
        for judge in judges:
            judge.requires_grad_(True)
        of_judges.zero_grad()
        pool.append(fake.detach())
        old = random.choice(pool) if random.random() < 0.5 else fake.detach()
        for judge in judges:
            ((judge(y)[:, 0] - 1).square().mean() + judge(old)[:, 0].square().mean()).backward()
        of_judges.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "the critic steps often and is clamped, the generator seldom (WGAN)")
def clamped_critic(t: Trial) -> None:
    critic, generator = Net(), Net()
    of_critic = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
    of_generator = torch.optim.RMSprop(generator.parameters(), lr=1e-3)
    t.track(critic)
    t.track(generator)
    t.apply(critic, of_critic)
    t.apply(generator, of_generator)
    for step in range(2):
        for turn in range(3):
            x, _ = tokens(3 * step + turn)
            with torch.no_grad():
                made = functional.pad(generator(torch.randn_like(x)), (0, 1))
            critic.zero_grad()
            (critic(made).mean() - critic(x).mean()).backward()
            of_critic.step()
            for p in critic.parameters():
                p.data.clamp_(-0.3, 0.3)
        for p in critic.parameters():
            p.requires_grad = False
        generator.zero_grad()
        loss = -critic(functional.pad(generator(torch.randn(4, 6, WIDTH)), (0, 1))).mean()
        loss.backward()
        of_generator.step()
        for p in critic.parameters():
            p.requires_grad = True
        t.note("loss", loss)
        t.end_step()


@attack(
    "second order",
    "negatives are sampled by gradients with respect to inputs in eval, weights without gradients, from a replay buffer (energy)",
)
def energy_with_replay(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    replay = torch.randn(8, 6, WIDTH)
    t.apply(model, optimizer)
    for step in range(3):
        x, y = tokens(step)
        chosen = torch.randint(0, 8, (4,))
        negative = replay[chosen].clone().requires_grad_()
        wanted = [p.requires_grad for p in model.parameters()]
        model.eval().requires_grad_(False)
        for _ in range(3):
            (slope,) = torch.autograd.grad(model(negative).logsumexp(-1).sum(), negative)
            negative.data += 0.1 * slope + 0.01 * torch.randn_like(negative)
        model.train()
        for p, want in zip(model.parameters(), wanted, strict=True):
            p.requires_grad_(want)
        replay[chosen] = negative.detach()
        logits = model(x)
        loss = functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        loss = loss + model(negative.detach()).logsumexp(-1).mean() - logits.logsumexp(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()
    t.note("replay", replay)
