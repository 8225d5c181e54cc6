"""Loops of scripts: manual chains of backward passes, policies, two networks, wrapped functions of torch, swapped tensors, losses with memory."""

import collections
import copy
import gc
import random

import torch
from tests.attacks.models import NUM_CLASSES, TOKENS, WIDTH, Net, adamw, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


def _each(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view_as(y).mean(1)


@attack(
    "gradients", "states detached in each step, and the backward pass carried on by hand over the last two (truncated)"
)
def truncated_by_hand(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    carried = [(None, torch.zeros(4, TOKENS, WIDTH))]
    for step in range(5):
        x, y = tokens(step)
        state = carried[-1][1].detach().requires_grad_()
        new = model.features(x + 0.5 * state)
        loss = functional.cross_entropy(model.head(new).flatten(0, 1), y.flatten())
        carried.append((state, new))
        while len(carried) > 3:
            carried.pop(0)
        if step % 2 == 1:
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            for number in range(len(carried) - 1, 0, -1):
                given, _ = carried[number]
                made = carried[number - 1][1]
                if given is None or made.grad_fn is None or carried[number - 1][0] is None:
                    break
                made.backward(given.grad, retain_graph=True)
            carried = [carried[-1]]
            optimizer.step()
            carried = [(None, carried[0][1].detach())]
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "epochs over a rollout end early after a backward pass, before its step; its gradients stay (PPO)",
    only=EXACT,
)
def policy_epochs_end_early(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model, lr=5e-2)
    t.apply(model, optimizer)
    for rollout in range(3):
        x, _ = tokens(rollout)
        with torch.no_grad():
            old = torch.distributions.Categorical(logits=model(x))
            actions = old.sample()
            before = old.log_prob(actions)
        gains = actions.to(x.dtype) - 3
        gains = (gains - gains.mean()) / gains.std()
        for epoch in range(4):
            now = torch.distributions.Categorical(logits=model(x))
            ratio = (now.log_prob(actions) - before).exp()
            loss = -torch.minimum(ratio * gains, ratio.clamp(0.8, 1.2) * gains).mean() - 0.01 * now.entropy().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            t.note("loss", loss)
            if epoch >= 1 and float((before - now.log_prob(actions)).mean()) > 0.01:
                break
            optimizer.step()
            optimizer.zero_grad()
        t.end_step()


@attack(
    "gradients", "a replay memory, a target network loaded now and then, gradients clamped one by one (DQN)", only=EXACT
)
def target_network(t: Trial) -> None:
    policy, target = Net(), Net()
    target.load_state_dict(policy.state_dict())
    optimizer = torch.optim.RMSprop(policy.parameters(), lr=1e-3)
    memory: collections.deque = collections.deque(maxlen=6)
    t.track(target)
    t.apply(policy, optimizer)
    target.eval()
    for step in range(6):
        x, y = tokens(step, batch=1)
        with torch.no_grad():
            values = policy(x)
            action = (
                values.argmax(-1)
                if random.random() > 0.3
                else torch.tensor([[random.randrange(NUM_CLASSES) for _ in y[0]]])
            )
        memory.append((x, action, y.to(x.dtype) / 3, tokens(step + 1, batch=1)[0]))
        if len(memory) >= 2:
            x, action, reward, following = (torch.cat(each) for each in zip(*random.sample(memory, 2), strict=True))
            value = policy(x).gather(-1, action[..., None])[..., 0]
            goal = reward + 0.9 * target(following).max(-1).values.detach()
            loss = functional.smooth_l1_loss(value, goal)
            optimizer.zero_grad()
            loss.backward()
            for p in policy.parameters():
                p.grad.data.clamp_(-1e-2, 1e-2)
            optimizer.step()
            t.note("loss", loss)
        if step % 3 == 2:
            target.load_state_dict(policy.state_dict())
        t.end_step()


@attack(
    "gradients", "an actor through a frozen critic, a temperature of its own, targets averaged after each step (SAC)"
)
def soft_actor(t: Trial) -> None:
    actor, critic = Net(), Net()
    critic.stem = nn.Linear(WIDTH + NUM_CLASSES, WIDTH)
    target = copy.deepcopy(critic).requires_grad_(False)
    log_alpha = nn.Parameter(torch.zeros(()))
    of_actor, of_critic = adamw(actor), adamw(critic)
    of_alpha = torch.optim.Adam([log_alpha], lr=1e-2)
    for model in (actor, critic, target):
        t.track(model)
    t.apply(actor, of_actor)
    t.apply(critic, of_critic)
    for step in range(4):
        x, y = tokens(step)
        with torch.no_grad():
            follow = actor(tokens(step + 1)[0]).softmax(-1)
            goal = y.to(x.dtype)[..., None] / 3 + 0.9 * target(torch.cat([tokens(step + 1)[0], follow], -1))
        loss = functional.mse_loss(critic(torch.cat([x, functional.one_hot(y, NUM_CLASSES).to(x)], -1)), goal)
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
        critic.requires_grad_(False)
        action = functional.gumbel_softmax(actor(x), tau=1.0)
        entropy = -(action * (action + 1e-6).log()).sum(-1).mean()
        judged = -critic(torch.cat([x, action], -1)).mean() - log_alpha.exp().detach() * entropy
        of_actor.zero_grad()
        judged.backward()
        of_actor.step()
        critic.requires_grad_(True)
        of_alpha.zero_grad()
        (log_alpha * (entropy.detach() - 0.5)).backward()
        of_alpha.step()
        for mine, theirs in zip(target.parameters(), critic.parameters(), strict=True):
            mine.data.mul_(0.9).add_(0.1 * theirs.data)
        t.note("losses", [loss, judged, log_alpha])
        t.end_step()


@attack("parts", "two networks choose for each other the examples of small loss (co-teaching)", only=EXACT)
def co_teaching(t: Trial) -> None:
    models = [Net(), Net()]
    optimizers = [sgd(m) for m in models]
    for model in models:
        t.track(model)
    for model, optimizer in zip(models, optimizers, strict=True):
        t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step, batch=6)
        losses = [_each(m(x), y) for m in models]
        chosen = [each.detach().argsort()[: 6 - step] for each in losses]
        for mine, theirs, optimizer in zip(losses, reversed(chosen), optimizers, strict=True):
            optimizer.zero_grad()
            loss = mine[theirs].mean()
            loss.backward()
            optimizer.step()
            t.note("loss", loss)
        t.end_step()


@attack(
    "parts",
    "labels averaged over epochs by example in a buffer of the criterion, written in its forward (early-learning)",
)
def targets_averaged_by_example(t: Trial) -> None:
    class Criterion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("targets", torch.zeros(8, TOKENS, NUM_CLASSES))

        def forward(self, index: torch.Tensor, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            shares = logits.softmax(-1).clamp(1e-4, 1 - 1e-4)
            self.targets[index] = 0.7 * self.targets[index] + 0.3 * shares.detach()
            far = (1 - (self.targets[index] * shares).sum(-1)).log().mean()
            return functional.cross_entropy(logits.flatten(0, 1), y.flatten()) + 0.3 * far

    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.criterion = Criterion()

        def forward(self, x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return self.criterion(index, self.head(self.features(x)), y)

    train(t, Model(), num_steps=5, batch=lambda step: (*tokens(step % 2), torch.arange(4) + 4 * (step % 2)))


@attack("gradients", "gradients are low-passed over steps, and what is slow is added once more (Grokfast)")
def slow_gradients_added(t: Trial) -> None:
    model = Net()
    slow: dict[str, torch.Tensor] = {}

    def filtered(_: int) -> None:
        for name, p in model.named_parameters():
            if p.grad is not None:
                slow[name] = p.grad.detach().clone() if name not in slow else slow[name] * 0.9 + p.grad * 0.1
                p.grad = p.grad + slow[name] * 2.0

    train(t, model, adamw(model), between=filtered)


@attack("changes", "the script replaces torch's cross_entropy by its own for some steps (a fused one is patched in)")
def cross_entropy_patched(t: Trial) -> None:
    model = Net()
    torchs = functional.cross_entropy
    seen: list[int] = []

    def own(logits: torch.Tensor, y: torch.Tensor, **kwargs: object) -> torch.Tensor:
        seen.append(logits.shape[0])
        return torchs(logits, y, **kwargs) + 1e-2 * logits.logsumexp(-1).square().mean()

    def patch(step: int) -> None:
        functional.cross_entropy = own if step in (1, 2) else torchs

    try:
        train(t, model, before=patch, num_steps=5)
    finally:
        functional.cross_entropy = torchs
    t.note("seen", seen)


@attack("gradients", "the script wraps Tensor.backward and puts it back later, between other things (a monitor)")
def backward_wrapped(t: Trial) -> None:
    model = Net()
    torchs = torch.Tensor.backward
    count = [0]

    def counted(self: torch.Tensor, *args: object, **kwargs: object) -> None:
        count[0] += 1
        torchs(self * 1.0, *args, **kwargs)

    def wrap(step: int) -> None:
        torch.Tensor.backward = counted if step in (1, 2) else torchs

    try:
        train(t, model, before=wrap, num_steps=5)
    finally:
        torch.Tensor.backward = torchs
    t.note("count", count[0])


@attack("changes", "weights loaded mid-run are swapped in as tensors (swap_module_params_on_conversion)")
def tensors_swapped(t: Trial) -> None:
    model = Net()
    kept = {name: value.clone() for name, value in model.state_dict().items()}

    def load(step: int) -> None:
        if step != 1:
            return
        # Torch exchanges nothing that is referred to weakly, as by what it keeps itself of a run on fake tensors.
        gc.collect()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.load_state_dict({name: value * 0.9 for name, value in kept.items()})
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    t.writes_within_step("")
    train(t, model, before=load)
