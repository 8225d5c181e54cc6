"""Training steps that hold others: samplers and solvers inside of the step, gradients by torch.autograd.grad, agents and targets, surgery on gradients."""

import contextvars
import copy
import dataclasses
import gc
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from tests.attacks.models import NUM_CLASSES, WIDTH, Block, Net, adamw, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


@attack(
    "gradients",
    "an energy model: negatives come of Langevin steps on the input, within the step, from a replay buffer",
    only=EXACT,
)
def langevin_with_replay(t: Trial) -> None:
    class Energy(Net):
        returns_loss = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.features(x)).logsumexp(-1).mean(1)

    model = Energy()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    chance = torch.Generator().manual_seed(5)
    replay = torch.randn(16, 6, WIDTH, generator=chance)
    for step in range(6):
        x, _ = tokens(step)
        rows = torch.randint(0, 16, (4,), generator=chance)
        sample = replay[rows].clone().requires_grad_(True)
        for p in model.parameters():
            p.requires_grad_(False)
        for _ in range(2 + step % 2):
            (g,) = torch.autograd.grad(model(sample).sum(), sample)
            sample = (
                (sample - 0.1 * g + 0.01 * torch.randn(sample.shape, generator=chance)).detach().requires_grad_(True)
            )
        for p in model.parameters():
            p.requires_grad_(True)
        replay[rows] = sample.detach()
        high, low = model(x), model(sample.detach())
        loss = high.mean() - low.mean() + 0.1 * (high**2 + low**2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()
    t.note("replay", replay)


@attack(
    "gradients",
    "conflicting gradients of two losses are projected on one another, by torch.autograd.grad with unused ones (PCGrad)",
    only=EXACT,
)
def projected_conflicts(t: Trial) -> None:
    class Two(Net):
        returns_loss = False

        def __init__(self) -> None:
            super().__init__()
            self.second = nn.Linear(WIDTH, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = self.features(x)
            return self.head(h), self.second(h)

    model = Two()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    weights = list(model.parameters())
    for step in range(5):
        x, y = tokens(step)
        first, second = model(x)
        losses = [functional.cross_entropy(first.flatten(0, 1), y.flatten()), second.square().mean()]
        found = [torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True) for loss in losses]
        dense = [[torch.zeros_like(w) if g is None else g for w, g in zip(weights, gs, strict=True)] for gs in found]
        dot = sum((a * b).sum() for a, b in zip(*dense, strict=True))
        for w, a, b in zip(weights, *dense, strict=True):
            share = dot / sum(g.square().sum() for g in dense[1]) if dot < 0 else 0.0
            w.grad = a - share * b + b
        optimizer.step()
        t.note("losses", [float(each) for each in losses])
        t.end_step()


@attack(
    "gradients",
    "PPO: several epochs over shuffled parts of a rollout, stopped early by the divergence from the old policy",
    only=EXACT,
)
def clipped_policy(t: Trial) -> None:
    class Policy(Net):
        returns_loss = False

        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Linear(WIDTH, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.distributions.Categorical, torch.Tensor]:
            h = self.features(x)
            return torch.distributions.Categorical(logits=self.head(h)), self.value(h).squeeze(-1)

    model = Policy()
    optimizer = adamw(model, lr=0.05)
    t.apply(model, optimizer)
    chance = torch.Generator().manual_seed(1)
    for step in range(3):
        x, _ = tokens(step, batch=8)
        with torch.no_grad():
            policy, value = model(x)
            taken = policy.sample()
            old = policy.log_prob(taken)
            gain = torch.randn(old.shape, generator=chance) - value
        for epoch in range(3):
            for part in torch.randperm(8, generator=chance).split(3):
                policy, value = model(x[part])
                now = policy.log_prob(taken[part])
                ratio = (now - old[part]).exp()
                loss = -torch.min(ratio * gain[part], ratio.clamp(0.8, 1.2) * gain[part]).mean()
                loss = loss + 0.5 * (value - gain[part]).square().mean() - 0.01 * policy.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                t.note("loss", loss)
                t.end_step()
            if float((old[part] - now.detach()).mean().abs()) > 0.03:
                t.note("stopped", epoch)
                break


@attack(
    "gradients",
    "SAC: two critics, targets by soft updates, the actor's loss goes through critics that are frozen for it",
    only=EXACT,
)
def soft_actor_critic(t: Trial) -> None:
    class Actor(Net):
        returns_loss = False

    class Critic(Net):
        returns_loss = False

        def forward(self, x: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
            return (self.head(self.features(x)) * action).sum(-1)

    actor, one, two = Actor(), Critic(), Critic()
    targets = [copy.deepcopy(each).requires_grad_(False) for each in (one, two)]
    of_actor = adamw(actor)
    of_critics = torch.optim.Adam([*one.parameters(), *two.parameters()], lr=1e-2)
    t.apply(actor, of_actor)
    t.apply(one, of_critics)
    t.track(two)
    for step in range(5):
        x, y = tokens(step)
        with torch.no_grad():
            then = actor(x.roll(1, 1)).softmax(-1)
            aim = torch.minimum(*(each(x.roll(1, 1), then) for each in targets)) * 0.9 + y.to(x.dtype)
        action = functional.one_hot(y, NUM_CLASSES).to(x.dtype)
        loss = sum((each(x, action) - aim).square().mean() for each in (one, two))
        of_critics.zero_grad()
        loss.backward()
        of_critics.step()
        for each in (one, two):
            each.requires_grad_(False)
        drawn = functional.gumbel_softmax(actor(x), tau=0.7)
        of_policy = -torch.minimum(one(x, drawn), two(x, drawn)).mean()
        of_actor.zero_grad()
        of_policy.backward()
        of_actor.step()
        for each in (one, two):
            each.requires_grad_(True)
        with torch.no_grad():
            for target, each in zip(targets, (one, two), strict=True):
                for a, b in zip(target.parameters(), each.parameters(), strict=True):
                    a.lerp_(b, 0.1)
        t.note("losses", [float(loss), float(of_policy)])
        t.end_step()


@attack(
    "recomputation",
    "a state is carried over batches, detached, and started anew where an episode ends inside of the batch",
    only=EXACT,
)
def carried_state_with_resets(t: Trial) -> None:
    class Carried(Block):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(WIDTH, WIDTH)
            self.state: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = self.state if self.state is not None else x.new_zeros(len(x), WIDTH)
            outputs = []
            for token in x.unbind(1):
                state = self.cell(token, state * (token[:, :1] < 1.2))
                outputs.append(state)
            self.state = state.detach()
            return super().forward(torch.stack(outputs, 1))

    train(t, Net([Carried(), Carried()]), num_steps=6)


class Out(NamedTuple):
    """What a layer returns."""

    hidden: torch.Tensor
    aux: torch.Tensor


@dataclasses.dataclass
class Output:
    """What a model returns."""

    loss: torch.Tensor
    logits: torch.Tensor
    extras: dict[str, Any]


@attack(
    "parts",
    "blocks return named tuples with a loss of their own, the model a dataclass, whose loss sums them",
    only=EXACT,
)
def named_outputs(t: Trial) -> None:
    class Balanced(Block):
        def forward(self, x: torch.Tensor) -> Out:
            y = super().forward(x)
            return Out(hidden=y, aux=y.square().mean())

    class Dataclassed(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Output:
            x, aux = self.stem(x), []
            for block in self.blocks:
                found = block(x)
                x = found.hidden
                aux.append(found.aux)
            logits = self.head(x)
            loss = functional.cross_entropy(logits.flatten(0, 1), y.flatten()) + 0.1 * sum(aux)
            return Output(loss=loss, logits=logits, extras={"aux": aux})

    model = Dataclassed([Balanced(), Balanced()], sequential=False)
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(5):
        out = model(*tokens(step))
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        t.note("out", [out.loss, out.logits.argmax(-1), *out.extras["aux"]])
        t.end_step()


@attack(
    "recomputation",
    "the model yields its layers' outputs one by one, and the loss of each is taken before the next runs",
    only=EXACT,
)
def generator_of_layers(t: Trial) -> None:
    class Yielding(Net):
        returns_loss = False

        def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
                yield self.head(x)
                x = x.detach()

    model = Yielding([Block(), Block(), Block()], sequential=False)
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(5):
        x, y = tokens(step)
        optimizer.zero_grad()
        for logits in model(x):
            loss = functional.cross_entropy(logits.flatten(0, 1), y.flatten())
            loss.backward()
            t.note("loss", loss)
            if loss < 1.0:
                break
        optimizer.step()
        t.end_step()


TEMPERATURE: contextvars.ContextVar[float] = contextvars.ContextVar("temperature", default=1.0)


@attack(
    "recomputation", "the temperature is a context variable that the loop sets around the forward alone", only=EXACT
)
def temperature_in_context(t: Trial) -> None:
    class Tempered(Block):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return super().inner(x) / TEMPERATURE.get()

    model = Net([Tempered(), Tempered()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(6):
        token = TEMPERATURE.set(1.0 + 0.2 * max(0, step - 2))
        loss = model(*tokens(step))
        TEMPERATURE.reset(token)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "a thread logs the weights' norms while the next forward waits for it", only=EXACT)
def logged_by_a_thread(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    seen: list[float] = []

    def log(_: int) -> None:
        def work() -> None:
            seen.append(sum(float(p.detach().norm()) for p in model.parameters()))
            seen.append(sum(float(p.grad.norm()) for p in model.parameters() if p.grad is not None))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    train(t, model, optimizer, num_steps=5, after=log)
    t.note("seen", seen)


@attack(
    "recomputation",
    "how often activations die is counted by weak references, and the count scales the next forward",
    only=EXACT,
)
def counts_the_dead(t: Trial) -> None:
    class Mourning(Block):
        dead = 0

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            class Token:
                pass

            token = Token()
            weakref.finalize(token, self._count)
            return super().inner(x) * (1 + 0.01 * (Mourning.dead % 3))

        @staticmethod
        def _count() -> None:
            Mourning.dead += 1

    Mourning.dead = 0
    train(t, Net([Mourning(), Mourning()]), num_steps=5, after=lambda _: gc.collect(0))
    t.note("dead", Mourning.dead)


@attack("recomputation", "Sinkhorn iterations until it has converged, so that their number is the data's", only=EXACT)
def sinkhorn_until_converged(t: Trial) -> None:
    class Assigned(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = (x @ x.transpose(1, 2)) / WIDTH
            for _ in range(20):
                scores = scores - scores.logsumexp(-1, keepdim=True)
                scores = scores - scores.logsumexp(-2, keepdim=True)
                if float((scores.detach().exp().sum(-1) - 1).abs().max()) < 1e-2:
                    break
            return super().forward(x + scores.exp() @ x)

    train(t, Net([Assigned(), Assigned()]), num_steps=5)


@attack(
    "recomputation",
    "an equilibrium is found without a graph, and a hook on its last application solves for the gradient (DEQ)",
    only=EXACT,
)
def equilibrium_with_hook(t: Trial) -> None:
    class Equilibrium(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def apply(z: torch.Tensor) -> torch.Tensor:
                return 0.5 * torch.tanh(self.inner(z)) + x

            with torch.no_grad():
                z = x
                for _ in range(20):
                    z = apply(z)
            z = apply(z)
            if not z.requires_grad:
                return z
            z0 = z.detach().requires_grad_()
            f0 = apply(z0)

            def solve(grad: torch.Tensor) -> torch.Tensor:
                found = grad
                for _ in range(8):
                    (step,) = torch.autograd.grad(f0, z0, found, retain_graph=True)
                    found = step + grad
                return found

            z.register_hook(solve)
            return z

    train(t, Net([Equilibrium(), Equilibrium()]))


@attack(
    "recomputation",
    "a queue of keys from a momentum encoder, overwritten in place at a pointer that wraps around (MoCo)",
    only=EXACT,
)
def queue_of_keys(t: Trial) -> None:
    class Contrast(Net):
        def __init__(self) -> None:
            super().__init__()
            self.keys_of = nn.Sequential(
                nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, NUM_CLASSES)
            ).requires_grad_(False)
            self.register_buffer("queue", torch.randn(10, NUM_CLASSES))
            self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

        def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            q = functional.normalize(self.head(self.features(x)).mean(1), dim=-1)
            with torch.no_grad():
                k = functional.normalize(self.keys_of(x).mean(1), dim=-1)
            logits = torch.cat([(q * k).sum(-1, keepdim=True), q @ self.queue.clone().t()], 1) / 0.2
            at = int(self.pointer)
            rows = (at + torch.arange(len(k))) % 10
            self.queue[rows] = k
            self.pointer[0] = (at + len(k)) % 10
            return functional.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))

    model = Contrast()

    def momentum(_: int) -> None:
        with torch.no_grad():
            model.keys_of[0].weight.lerp_(model.stem.weight, 0.05)

    train(t, model, num_steps=6, after=momentum)


@attack(
    "changes", "out of memory is caught, the batch halved and tried again, with the gradients as they are", only=EXACT
)
def retried_in_halves(t: Trial) -> None:
    class Small(Block):
        limit = 4

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) > Small.limit:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return super().forward(x)

    model = Net([Block(), Small()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(6):
        x, y = tokens(step, batch=8 if step in (3, 5) else 4)
        size = len(x)
        while True:
            optimizer.zero_grad()
            try:
                for part, aim in zip(x.split(size), y.split(size), strict=True):
                    (model(part, aim) * len(part) / len(x)).backward()
                break
            except torch.OutOfMemoryError:
                size //= 2
        optimizer.step()
        t.note("size", size)
        t.end_step()


@attack(
    "second order",
    "MAML with inner steps by functional_call, the outer one through them, and a first-order variant from step 2 on",
    only=EXACT,
)
def maml_then_first_order(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        weights = dict(model.named_parameters())
        for inner in range(2):
            loss = torch.func.functional_call(model, weights, tokens(10 * step + inner))
            grads = torch.autograd.grad(loss, list(weights.values()), create_graph=step < 2)
            weights = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), grads, strict=True)}
        outer = torch.func.functional_call(model, weights, tokens(10 * step + 5))
        optimizer.zero_grad()
        outer.backward()
        optimizer.step()
        t.note("outer", outer)
        t.end_step()


@attack("second order", "a neural ODE by RK4 with a Hutchinson trace of the Jacobian (FFJORD)", only=EXACT)
def flow_with_trace(t: Trial) -> None:
    class Flow(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("noise", torch.randn(WIDTH))

        def slope(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if not x.requires_grad:
                x = x.requires_grad_()
            with torch.enable_grad():
                y = torch.tanh(self.blocks(x))
                e = self.noise.expand_as(x)
                (je,) = torch.autograd.grad(y, x, e, create_graph=True)
            return y, (je * e).sum(-1)

        def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            x, trace = self.stem(x), 0.0
            for _ in range(2):
                k1, t1 = self.slope(x)
                k2, t2 = self.slope(x + 0.25 * k1)
                x, trace = x + 0.25 * (k1 + k2), trace + 0.25 * (t1 + t2)
            return (x.square().sum(-1) * 0.5 - trace).mean() + self.head(x).square().mean()

    train(t, Flow(), num_steps=3)


@attack("gradients", "a window of losses decides whether the step is taken twice, with the same gradients", only=EXACT)
def step_taken_twice(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    window: deque[float] = deque(maxlen=3)
    t.apply(model, optimizer)
    for step in range(6):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        window.append(loss.item())
        if step >= 3 and window[-1] > sum(window) / len(window):
            t.end_step()
            optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "gradients live in one flat buffer, of which each .grad is a view, zeroed as a whole")
def flat_gradient_views(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    begin = 0
    for p in model.parameters():
        p.grad = flat[begin : begin + p.numel()].view_as(p)
        begin += p.numel()
    t.apply(model, optimizer)
    for step in range(5):
        flat.zero_()
        loss = model(*tokens(step))
        loss.backward()
        norm = flat.norm()
        flat.mul_(min(1.0, 0.5 / float(norm)))
        optimizer.step()
        t.note("norm", norm)
        t.end_step()


@attack(
    "gradients",
    "a counter of unlucky steps skips the optimizer where the loss is not finite, from step 4 on it is so twice",
)
def skips_lost_losses(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    skipped = 0
    for step in range(8):
        x, y = tokens(step)
        if step in (4, 6):
            x[0, 0, 0] = float("nan")
        loss = model(x, y)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss.backward()
        if not torch.isfinite(loss):
            skipped += 1
            t.note("skipped", skipped)
            t.end_step()
            continue
        optimizer.step()
        t.note("loss", loss)
        t.end_step()
