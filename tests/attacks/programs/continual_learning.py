"""Tasks one after another, as methods against forgetting have them: Fisher penalties, paths of weights, gradients of a memory, old models."""

import copy
import random

import torch
from tests.attacks.models import WIDTH, Block, Net, adamw, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@attack("gradients", "gradients against those of a memory are projected off it, kept as one vector per task (A-GEM)")
def gradients_of_memory(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        reference = None
        if step:
            optimizer.zero_grad()
            model(*tokens(step - 1)).backward()
            reference = torch.cat([p.grad.view(-1) for p in _trained(model).values()])
        optimizer.zero_grad()
        loss = model(*tokens(step))
        loss.backward()
        if reference is not None:
            grad = torch.cat([p.grad.view(-1) for p in _trained(model).values()])
            dot = torch.dot(grad, reference)
            if dot < 0.3:
                grad = grad - dot / reference.square().sum() * reference
                begin = 0
                for p in _trained(model).values():
                    p.grad.copy_(grad[begin : begin + p.numel()].view_as(p))
                    begin += p.numel()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "changes",
    "after a task the model is copied, frozen, and its answers hold the new one (learning without forgetting)",
)
def answers_of_the_old(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    old = None
    for step in range(5):
        if step == 2:
            old = copy.deepcopy(model).eval().requires_grad_(False)
        x, y = tokens(step)
        logits = model(x)
        loss = model.loss(logits, y)
        if old is not None:
            with torch.no_grad():
                before = functional.softmax(old(x) / 2, -1)
            loss = loss - (before * functional.log_softmax(logits / 2, -1)).sum(-1).mean() * 4
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "recomputation",
    "a reservoir of past batches, chosen by Python's random, is replayed with the logits it had (DER++)",
)
def reservoir_of_logits(t: Trial) -> None:
    model = Net([Block(), nn.Sequential(Block(), nn.Dropout(0.2))])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    kept: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for step in range(5):
        x, y = tokens(step)
        optimizer.zero_grad()
        logits = model(x)
        loss = model.loss(logits, y)
        if kept:
            old_x, _, old_logits = random.choice(kept)
            loss = loss + 0.5 * functional.mse_loss(model(old_x), old_logits)
            old_x, old_y, _ = random.choice(kept)
            loss = loss + 0.5 * model(old_x, old_y)
        loss.backward()
        optimizer.step()
        if len(kept) < 2:
            kept.append((x, y, logits.data))
        elif (place := random.randint(0, step)) < 2:
            kept[place] = (x, y, logits.data)
        t.note("loss", loss)
        t.end_step()


class _HardAttention(nn.Module):
    """Units gated by an embedding of the task, annealed within an epoch (HAT)."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gates = nn.Embedding(2, WIDTH)

    def mask(self, task: int, s: float) -> torch.Tensor:
        """How open each unit is."""
        return torch.sigmoid(s * self.gates(torch.tensor(task)))

    def forward(self, x: torch.Tensor, task: int, s: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens, and the mask for the loss and for gradients."""
        mask = self.mask(task, s)
        return x + self.out(functional.relu(self.fc(x)) * mask), mask


class _HatNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(_HardAttention() for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 7) for _ in range(2))

    def forward(self, task: int, x: torch.Tensor, s: float = 1.0) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Logits of the task, and all masks."""
        masks, x = [], self.stem(x)
        for block in self.blocks:
            x, mask = block(x, task, s)
            masks.append(mask)
        return self.heads[task](x), masks


@attack(
    "gradients",
    "hard attention to the task: gates annealed, gradients of used units zeroed, those of gates compensated (HAT)",
)
def hard_attention_to_task(t: Trial) -> None:
    model = _HatNet()
    optimizer = sgd(model, momentum=0.0)
    t.apply(model, optimizer)
    used = [torch.zeros(WIDTH) for _ in range(2)]
    for step in range(6):
        task, s = step // 3, (step % 3 + 1) * 4.0
        x, y = tokens(step)
        logits, masks = model(task, x, s)
        total = sum((m * (1 - u)).sum() for m, u in zip(masks, used, strict=True))
        loss = functional.cross_entropy(logits.flatten(0, 1), y.flatten()) + 0.1 * total / sum(
            (1 - u).sum() for u in used
        )
        optimizer.zero_grad()
        loss.backward()
        for block, u in zip(model.blocks, used, strict=True):
            if block.fc.weight.grad is not None:
                block.fc.weight.grad.data *= (1 - u)[:, None]
            gate = block.gates.weight
            num = torch.cosh(torch.clamp(s * gate.data, -50, 50)) + 1
            gate.grad.data *= 10.0 / s * num / (torch.cosh(gate.data) + 1)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10000)
        optimizer.step()
        for block in model.blocks:
            block.gates.weight.data = torch.clamp(block.gates.weight.data, -6, 6)
        if step == 2:
            used = [torch.max(u, b.mask(0, 10.0).detach()) for u, b in zip(used, model.blocks, strict=True)]
        t.note("loss", loss)
        t.end_step()


class _CenterLoss(nn.Module):
    """Distances to a learned centre for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.randn(7, WIDTH))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean squared distance."""
        return (x - self.centers[y]).square().sum(-1).clamp(min=1e-12, max=1e12).mean()


@attack(
    "gradients",
    "centres of classes in a criterion with an optimizer of its own, whose gradient is divided by the loss's weight (center loss)",
)
def center_loss(t: Trial) -> None:
    model, criterion = Net(), _CenterLoss()
    optimizer, of_centers = adamw(model), torch.optim.SGD(criterion.parameters(), lr=0.5)
    t.track(criterion)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        features = model.features(x)
        loss = model.loss(model.head(features), y) + 0.05 * criterion(features, y)
        optimizer.zero_grad()
        of_centers.zero_grad()
        loss.backward()
        optimizer.step()
        for p in criterion.parameters():
            p.grad.data *= 1.0 / 0.05
        of_centers.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "activations settle by steps of their own optimizer before the weights learn from what is left (predictive coding)",
)
def predictive_coding(t: Trial) -> None:
    model = Net(sequential=False)
    optimizer = sgd(model, momentum=0.0)
    t.apply(model, optimizer)
    for step in range(3):
        x, y = tokens(step)
        with torch.no_grad():
            first = model.blocks[0](model.stem(x))
            second = model.blocks[1](first)
        states = [nn.Parameter(first.clone()), nn.Parameter(second.clone())]
        of_states = torch.optim.SGD(states, lr=0.1)
        for _ in range(3):
            of_states.zero_grad()
            energy = (states[0] - model.blocks[0](model.stem(x))).square().mean()
            energy = energy + (states[1] - model.blocks[1](states[0])).square().mean()
            energy = energy + model.loss(model.head(states[1]), y)
            energy.backward(inputs=states)
            of_states.step()
            t.note("energy", energy)
        optimizer.zero_grad()
        loss = (states[0].detach() - model.blocks[0](model.stem(x))).square().mean()
        loss = loss + (states[1].detach() - model.blocks[1](states[0].detach())).square().mean()
        loss = loss + model.loss(model.head(states[1].detach()), y)
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "a free and a nudged phase settle; the difference of two energies' gradients is the update (equilibrium propagation)",
)
def equilibrium_propagation(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model, momentum=0.0)
    t.apply(model, optimizer)

    def energy(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * state.square().sum() - (state * torch.tanh(model.features(x))).sum()

    for step in range(3):
        x, y = tokens(step)
        phases = []
        for beta in (0.0, 0.5):
            state = torch.zeros_like(x).requires_grad_()
            for _ in range(3):
                total = energy(state, x) / len(x) + beta * model.loss(model.head(state), y)
                (slope,) = torch.autograd.grad(total, state)
                state = (state - 0.5 * slope).detach().requires_grad_()
            phases.append(state.detach())
        optimizer.zero_grad()
        loss = (energy(phases[1], x) - energy(phases[0], x)) / 0.5 / len(x) + model.loss(model.head(phases[1]), y)
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


class _FastWeights(nn.Module):
    """A matrix is written by each token and read by those after it (a delta rule), and kept from batch to batch, detached."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.beta = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 1)
        self.memory = torch.zeros(1, WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens with what the memory answered."""
        memory, answers = self.memory.expand(len(x), -1, -1), []
        for q, key, v, b in zip(*(e.unbind(1) for e in (*self.qkv(x).chunk(3, -1), self.beta(x))), strict=True):
            k = functional.normalize(functional.elu(key) + 1, dim=-1)
            old = torch.einsum("bij,bj->bi", memory, k)
            memory = memory + torch.einsum("bi,bj->bij", torch.sigmoid(b) * (v - old), k)
            answers.append(torch.einsum("bij,bj->bi", memory, functional.softmax(q, -1)))
        if self.training:
            self.memory = memory.mean(0, keepdim=True).detach() * 0.5
        return x + torch.stack(answers, 1)


@attack(
    "recomputation",
    "a delta rule writes fast weights token by token; the mean of what is left is where the next batch begins",
)
def fast_weights(t: Trial) -> None:
    train(t, Net(_FastWeights() for _ in range(2)))


class _TestTimeLayer(nn.Module):
    """A linear layer inside that takes a step of its own on each half of the tokens, by hand-written gradients (TTT)."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.eye(WIDTH) * 0.1)
        self.k, self.v, self.q = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.log_rate = nn.Parameter(torch.tensor(-2.0))
        self.num_inner = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens of the same shape."""
        weight, found = self.start.expand(len(x), -1, -1), []
        for part in x.chunk(2, 1):
            k, v = self.k(part), self.v(part)
            gradient = torch.einsum("bti,btj->bij", k @ weight - v, k).transpose(1, 2)
            weight = weight - self.log_rate.exp() * gradient
            found.append(self.q(part) @ weight)
            self.num_inner += 1
        return x + torch.cat(found, 1)


@attack(
    "recomputation",
    "a layer that learns within its forward, half a sequence at a time, and counts its inner steps (test-time training)",
)
def test_time_layer(t: Trial) -> None:
    train(t, Net(_TestTimeLayer() for _ in range(2)))


@attack(
    "gradients",
    "the loss of each task is balanced by its gradient's norm at the shared features, by two partial backward passes (MGDA)",
    only=EXACT,
)
def features_as_leaf(t: Trial) -> None:
    model = Net()
    other = nn.Linear(WIDTH, 1)
    t.track(other)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        optimizer.zero_grad()
        features = model.features(x)
        leaf = features.detach().requires_grad_()
        losses = [model.loss(model.head(leaf), y), other(leaf).square().mean()]
        slopes = []
        for loss in losses:
            leaf.grad = None
            loss.backward()
            slopes.append(leaf.grad.clone())
        a, b = slopes
        share = (((b - a) * b).sum() / (a - b).square().sum()).clamp(0, 1)
        features.backward(share * a + (1 - share) * b)
        optimizer.step()
        t.note("losses", losses)
        t.end_step()
