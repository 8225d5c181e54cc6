"""Updates as repositories write them: attacks on embeddings between two backward passes, weights sampled by class, averages exchanged in place."""

import copy
import math

import torch
from tests.attacks.models import NUM_CLASSES, WIDTH, Block, Net, adamw, sgd, tokens
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


@attack(
    "gradients",
    "the embedding is moved along its gradient between two backward passes whose gradients add up, then put back (FGM)",
)
def embedding_attacked(t: Trial) -> None:
    class Attacker:
        def __init__(self, model: nn.Module) -> None:
            self.model, self.backup = model, {}

        def attack(self, epsilon: float = 0.5, name: str = "stem") -> None:
            for n, p in self.model.named_parameters():
                if p.requires_grad and name in n:
                    self.backup[n] = p.data.clone()
                    norm = torch.norm(p.grad)
                    if norm != 0 and not torch.isnan(norm):
                        p.data.add_(epsilon * p.grad / norm)

        def restore(self, name: str = "stem") -> None:
            for n, p in self.model.named_parameters():
                if p.requires_grad and name in n:
                    p.data = self.backup[n]
            self.backup = {}

    model = Net()
    optimizer = adamw(model)
    attacker = Attacker(model)
    t.writes_within_step("stem.weight", "stem.bias")
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        model(x, y).backward()
        attacker.attack()
        model(x, y).backward()
        attacker.restore()
        optimizer.step()
        model.zero_grad()
        t.end_step()


@attack(
    "gradients",
    "the embedding is moved several times within a ball, gradients of the clean pass are kept and put back for the last (PGD)",
    only=EXACT,
)
def embedding_attacked_in_steps(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.writes_within_step("stem.weight")
    t.apply(model, optimizer)
    for step in range(3):
        x, y = tokens(step)
        model(x, y).backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad and p.grad is not None}
        weight = model.stem.weight
        before = weight.data.clone()
        for k in range(3):
            norm = torch.norm(weight.grad)
            weight.data.add_(0.3 * weight.grad / norm)
            moved = weight.data - before
            if torch.norm(moved) > 0.5:
                moved = 0.5 * moved / torch.norm(moved)
            weight.data = before + moved
            if k != 2:
                model.zero_grad()
            else:
                for n, p in model.named_parameters():
                    if n in grads:
                        p.grad = grads[n]
            model(x, y).backward()
        weight.data = before
        optimizer.step()
        optimizer.zero_grad()
        t.end_step()


@attack(
    "gradients",
    "noise on inputs grows by its own gradients in several passes, whose weight gradients are summed for one step (FreeLB)",
    only=EXACT,
)
def free_large_batch(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(3):
        x, y = tokens(step)
        delta = torch.zeros_like(x).uniform_(-1, 1) * 0.1 / math.sqrt(x.shape[1])
        for k in range(3):
            delta.requires_grad_()
            loss = model(x + delta, y) / 3
            loss.backward()
            if k == 2:
                break
            grad = delta.grad.clone().detach()
            norm = torch.norm(grad.view(len(x), -1), dim=1).view(-1, 1, 1).clamp(min=1e-8)
            delta = (delta + 0.1 * grad / norm).detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()
        t.note("delta", delta)
        t.end_step()


@attack(
    "gradients",
    "gradients at weights moved up are split along those before, and their rest is added back, norms over all (GSAM)",
    only=EXACT,
)
def surrogate_gap(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.writes_within_step("weight", "bias")
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        optimizer.zero_grad()
        model(x, y).backward()
        with torch.no_grad():
            scale = 0.05 / (torch.norm(torch.stack([(p.abs() * p.grad).norm(2) for p in model.parameters()])) + 1e-12)
            state = {}
            for p in model.parameters():
                moved = p.abs() * p.grad * scale
                state[p] = (p.grad.data.clone(), moved)
                p.add_(moved)
        optimizer.zero_grad()
        model(x, y).backward()
        with torch.no_grad():
            inner = sum(torch.sum(state[p][0] * p.grad.data) for p in model.parameters())
            new = torch.norm(torch.stack([p.grad.data.norm(2) for p in model.parameters()]))
            old = torch.norm(torch.stack([state[p][0].norm(2) for p in model.parameters()]))
            cosine = inner / (new * old + 1e-12)
            for p in model.parameters():
                p.sub_(state[p][1])
                vertical = state[p][0] - cosine * old * p.grad.data / (new + 1e-12)
                p.grad.data.add_(vertical, alpha=-0.4)
        optimizer.step()
        t.end_step()


@attack(
    "gradients",
    "gradients of tasks are copied out one by one, a common direction is sought by minimising in the loop, and put back (CAGrad)",
    only=EXACT,
)
def conflict_averse(t: Trial) -> None:
    class Tasks(Net):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(WIDTH, NUM_CLASSES) for _ in range(3))

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            x = self.features(x)
            return [head(x) for head in self.heads]

    model = Tasks()
    shared = [*model.stem.parameters(), *model.blocks.parameters()]
    sizes = [p.data.numel() for p in shared]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        losses = [functional.cross_entropy(o.transpose(1, 2), y.roll(i, 1)) for i, o in enumerate(model(x))]
        optimizer.zero_grad()
        grads = torch.zeros(sum(sizes), 3)
        for i, loss in enumerate(losses):
            loss.backward(retain_graph=i < 2)
            begin = 0
            for p, size in zip(shared, sizes, strict=True):
                grads[begin : begin + size, i].copy_(p.grad.data.view(-1))
                begin += size
                p.grad = None
        products = grads.t().mm(grads)
        g0 = (products.mean() + 1e-8).sqrt()
        w = torch.zeros(3, 1, requires_grad=True)
        inner = torch.optim.SGD([w], lr=5, momentum=0.5)
        for _ in range(6):
            inner.zero_grad()
            share = torch.softmax(w, 0)
            objective = (
                share.t().mm(products).mean() + 0.4 * g0 * (share.t().mm(products).mm(share) + 1e-4).sqrt()
            ).sum()
            objective.backward()
            inner.step()
        with torch.no_grad():
            share = torch.softmax(w, 0)
            norm = (share.t().mm(products).mm(share) + 1e-4).sqrt()
            found = (grads.mean(1) + (0.4 * g0 / (norm + 1e-4)).view(()) * grads.mm(share)[:, 0]) / (1 + 0.4**2)
            begin = 0
            for p, size in zip(shared, sizes, strict=True):
                p.grad = found[begin : begin + size].view_as(p).clone()
                begin += size
        optimizer.step()
        t.note("share", share)
        t.end_step()


@attack(
    "changes",
    "classes are sampled for each batch: the optimizer's parameter and momentum are exchanged for rows, and written back (partial FC)",
    only=EXACT,
)
def sampled_class_weights(t: Trial) -> None:
    model = Net()
    weight, momentum = torch.randn(12, NUM_CLASSES) * 0.1, torch.zeros(12, NUM_CLASSES)
    sub = nn.Parameter(torch.empty(0, 0))
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": [sub]}], lr=0.1, momentum=0.9)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        labels = (y[:, 0] + 5 * (step % 2)).clone()
        positive = torch.unique(labels, sorted=True)
        chances = torch.rand(12)
        chances[positive] = 2.0
        index = torch.topk(chances, k=8)[1].sort()[0]
        labels = torch.searchsorted(index, labels)
        optimizer.state.pop(optimizer.param_groups[-1]["params"][0], None)
        sub = nn.Parameter(weight[index].clone())
        optimizer.param_groups[-1]["params"][0] = sub
        optimizer.state[sub]["momentum_buffer"] = momentum[index].clone()
        features = functional.normalize(model(x).mean(1))
        whole = features.detach().requires_grad_(True)
        logits = 8 * functional.linear(whole, functional.normalize(sub))
        logits[torch.arange(4), labels] -= 0.4
        with torch.no_grad():
            shares = torch.exp(logits - logits.max(1, keepdim=True)[0])
            shares /= shares.sum(1, keepdim=True)
            shares[torch.arange(4), labels] -= 1
            shares /= len(x)
        logits.backward(shares)
        gradient = whole.grad.detach().clone()
        whole.grad.zero_()
        features.backward(gradient)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=5, norm_type=2)
        optimizer.step()
        momentum[index], weight[index] = optimizer.state[sub]["momentum_buffer"], sub.data
        optimizer.zero_grad()
        t.note("weight", weight)
        t.end_step()


@attack(
    "changes",
    "moments of weights are collected after each epoch, and a drawn net is put in by taking parameters out of the tree (SWAG)",
    only=EXACT,
)
def drawn_net(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    drawn = copy.deepcopy(model)
    places = []
    for module in drawn.modules():
        for name in list(module._parameters):
            if module._parameters[name] is None:
                continue
            data = module._parameters[name].data
            module._parameters.pop(name)
            module.register_buffer(f"{name}_mean", data.new(data.size()).zero_())
            module.register_buffer(f"{name}_sq_mean", data.new(data.size()).zero_())
            places.append((module, name))
    t.apply(model, optimizer)
    for step in range(6):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 2:
            n = step // 2
            for (module, name), p in zip(places, model.parameters(), strict=True):
                mean, square = getattr(module, f"{name}_mean"), getattr(module, f"{name}_sq_mean")
                mean.copy_(mean * n / (n + 1.0) + p.data / (n + 1.0))
                square.copy_(square * n / (n + 1.0) + p.data**2 / (n + 1.0))
            for module, name in places:
                mean, square = getattr(module, f"{name}_mean"), getattr(module, f"{name}_sq_mean")
                var = torch.clamp(square - mean**2, 1e-30)
                setattr(module, name, mean + torch.randn_like(var) * 0.5 * torch.sqrt(var + 1e-6))
            with torch.no_grad():
                t.note("drawn", drawn(*tokens(50)))
        t.end_step()


@attack(
    "changes",
    "weights and their average change places in the optimizer's tensors after each epoch (switch EMA), moments stay",
    only=EXACT,  # lerp_ takes no two dtypes
)
def average_switched_in(t: Trial) -> None:
    model = Net()
    ema = copy.deepcopy(model).requires_grad_(False)
    optimizer = adamw(model)
    t.track(ema)
    t.apply(model, optimizer)
    for step in range(6):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for p, e in zip(model.parameters(), ema.parameters(), strict=True):
                e.lerp_(p, 0.3)
            if step % 2:
                for p, e in zip(model.parameters(), ema.parameters(), strict=True):
                    p.data, e.data = e.data, p.data
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "weights of tasks follow how fast losses fall, gradients of tasks are weighed by Frank and Wolfe's way (MGDA), in one loop",
    only=EXACT,
)
def least_norm_of_tasks(t: Trial) -> None:
    model = Net([Block() for _ in range(2)])
    second = nn.Linear(WIDTH, NUM_CLASSES)
    optimizer = torch.optim.Adam([*model.parameters(), *second.parameters()], lr=1e-2)
    t.track(second)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        optimizer.zero_grad()
        with torch.no_grad():
            representation = model.features(x)
        held = representation.detach().clone().requires_grad_(True)
        grads, losses = [], []
        for head, goal in ((model.head, y), (second, y.flip(1))):
            optimizer.zero_grad()
            loss = functional.cross_entropy(head(held).transpose(1, 2), goal)
            loss.backward()
            grads.append(held.grad.data.clone())
            losses.append(loss.item())
            held.grad.data.zero_()
        normed = [g / losses[i] for i, g in enumerate(grads)]
        a, b, c = ((normed[i] * normed[j]).sum() for i, j in ((0, 0), (0, 1), (1, 1)))
        share = float(torch.clamp((c - b) / (a + c - 2 * b + 1e-12), 0, 1))
        optimizer.zero_grad()
        features = model.features(x)
        total = share * functional.cross_entropy(model.head(features).transpose(1, 2), y)
        total = total + (1 - share) * functional.cross_entropy(second(features).transpose(1, 2), y.flip(1))
        total.backward()
        optimizer.step()
        t.note("share", share)
        t.end_step()
