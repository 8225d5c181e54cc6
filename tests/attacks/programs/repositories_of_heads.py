"""Heads, attention and loops as repositories have them: losses that write over logits, biases shared by layers, banks with a constant of the first batch, clones for inner steps."""

import copy
import math
from typing import Any

import numpy as np
import torch
from tests.attacks.models import NUM_CLASSES, WIDTH, Block, Images, Net, adamw, images, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


class _OverLogits(torch.autograd.Function):
    """Writes over the logits that it is given, and saves what becomes of them."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits.sub_(torch.max(logits, dim=-1)[0].unsqueeze(dim=-1))
        rows = logits.view(-1, logits.shape[-1])
        flat = target.view(-1)
        predicted = rows[torch.arange(len(rows)), flat].clone().contiguous().view_as(target)
        exp = logits
        torch.exp(logits, out=exp)
        sums = exp.sum(dim=-1)
        loss = torch.log(sums) - predicted
        exp.div_(sums.unsqueeze(dim=-1))
        ctx.save_for_backward(exp, flat)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        shares, flat = ctx.saved_tensors
        found = shares
        rows = found.view(-1, shares.size(-1))
        rows[torch.arange(len(rows)), flat] -= 1.0
        found.mul_(gradients[0].unsqueeze(dim=-1))
        return found, None


@attack(
    "parts",
    "a loss writes over its logits in the forward and over its shares in the backward pass (Megatron's cross-entropy)",
)
def loss_over_logits(t: Trial) -> None:
    class Over(Net):
        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return _OverLogits.apply(logits, y).mean()

    train(t, Over(), num_steps=4)


@attack("parts", "the same, of logits with time first, and a mask of tokens over which the mean is taken by hand")
def loss_over_logits_time_first(t: Trial) -> None:
    class Over(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            logits = self.head(self.features(x.transpose(0, 1).contiguous()))
            if y is None:
                return logits.transpose(0, 1)
            losses = _OverLogits.apply(logits, y.T.contiguous()).transpose(0, 1).contiguous()
            mask = (y != 0).to(losses.dtype).view(-1)
            return torch.sum(losses.view(-1) * mask) / mask.sum()

    train(t, Over(), num_steps=4)


class _SmoothedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, smoothing: float, padding: int) -> torch.Tensor:
        with torch.no_grad():
            logs = logits.log_softmax(-1)
            top = torch.logsumexp(logits, -1)
            losses = -(1 - smoothing) * logs.gather(-1, labels[:, None])[:, 0] - smoothing * logs.mean(-1)
            losses.masked_fill_(labels == padding, 0)
        ctx.save_for_backward(logits, top, labels)
        ctx.smoothing, ctx.padding = smoothing, padding
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        logits, top, labels = ctx.saved_tensors
        gradient = gradients[0].contiguous().masked_fill(labels == ctx.padding, 0)
        shares = torch.exp(logits - top[:, None])
        shares = shares - ctx.smoothing / logits.shape[-1]
        shares[torch.arange(len(labels)), labels] -= 1 - ctx.smoothing
        return shares * gradient[:, None], None, None, None


@attack(
    "parts",
    "a smoothed loss keeps logits and their log-sum, a class of padding counts for nothing (Apex's cross-entropy)",
)
def smoothed_loss_with_padding(t: Trial) -> None:
    class Smoothed(Net):
        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            losses = _SmoothedLoss.apply(logits.view(-1, NUM_CLASSES), y.view(-1), 0.1, 0)
            return losses.sum() / (y != 0).sum()

    train(t, Smoothed(), num_steps=4)


class _Relative(nn.Module):
    """Attention with a bias by distance that the first layer makes and hands on."""

    is_attention = True

    def __init__(self, has_bias: bool) -> None:
        super().__init__()
        self.norm, self.q, self.k, self.v, self.o = (
            nn.LayerNorm(WIDTH),
            *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)),
        )
        self.bias = nn.Embedding(8, 2) if has_bias else None

    def forward(self, x: torch.Tensor, position_bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        b, n, _ = x.shape
        y = self.norm(x)
        q, k, v = (layer(y).view(b, n, 2, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = torch.matmul(q, k.transpose(3, 2))
        if position_bias is None:
            places = torch.arange(n)
            far = places[None] - places[:, None]
            buckets = (far > 0).long() * 4 + torch.min(far.abs(), torch.tensor(3))
            position_bias = self.bias(buckets).permute(2, 0, 1).unsqueeze(0)
        scores += position_bias
        weights = functional.softmax(scores.float(), dim=-1).type_as(scores)
        weights = functional.dropout(weights, p=0.1, training=self.training)
        return x + self.o(torch.matmul(weights, v).transpose(1, 2).reshape(b, n, -1)), position_bias


@attack(
    "parts",
    "the first layer makes a learned bias by distance, all layers add it to their scores in place (T5)",
    only=EXACT,
)
def bias_of_the_first_layer(t: Trial) -> None:
    class Five(Net):
        def __init__(self) -> None:
            super().__init__([_Relative(i == 0) for i in range(3)], sequential=False)

        def features(self, x: torch.Tensor) -> torch.Tensor:
            x, bias = self.stem(x), None
            for block in self.blocks:
                x, bias = block(x, position_bias=bias)
            return x

    train(t, Five(), num_steps=4)


@attack(
    "parts",
    "scores of content and of distance with two biases shared by layers, shifted by a view; memories as arguments (Transformer-XL)",
    only=EXACT,
)
def shifted_scores(t: Trial) -> None:
    class Shifted(nn.Module):
        is_attention = True

        def __init__(self, u: nn.Parameter, v: nn.Parameter) -> None:
            super().__init__()
            self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
            self.r, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
            self.u, self.w = u, v

        def shift(self, x: torch.Tensor) -> torch.Tensor:
            zero = torch.zeros((x.size(0), 1, *x.size()[2:]), dtype=x.dtype)
            padded = torch.cat([zero, x], dim=1)
            return padded.view(x.size(1) + 1, x.size(0), *x.size()[2:])[1:].view_as(x)

        def forward(
            self, x: torch.Tensor, r: torch.Tensor, mask: torch.Tensor, mems: torch.Tensor | None = None
        ) -> torch.Tensor:
            n, b = x.size(0), x.size(1)
            seen = x if mems is None or not mems.numel() else torch.cat([mems, x], 0)
            q, k, v = torch.chunk(self.qkv(self.norm(seen)), 3, dim=-1)
            q, m = q[-n:], k.size(0)
            q, k, v = (each.view(-1, b, 2, WIDTH // 2) for each in (q, k, v))
            r = self.r(r).view(m, 2, WIDTH // 2)
            content = torch.einsum("ibnd,jbnd->ijbn", q + self.u, k)
            distance = self.shift(torch.einsum("ibnd,jnd->ijbn", q + self.w, r))
            scores = (content + distance).mul_(1 / math.sqrt(WIDTH // 2))
            scores = scores.masked_fill(mask[:, :, None, None], -float("inf")).type_as(scores)
            weights = functional.softmax(scores, dim=1)
            found = torch.einsum("ijbn,jbnd->ibnd", weights, v).contiguous().view(n, b, WIDTH)
            return x + self.o(found)

    class Xl(Net):
        def __init__(self) -> None:
            u, v = nn.Parameter(torch.randn(2, WIDTH // 2) * 0.1), nn.Parameter(torch.randn(2, WIDTH // 2) * 0.1)
            super().__init__([Shifted(u, v) for _ in range(2)], sequential=False)

        def forward(self, x: torch.Tensor, y: torch.Tensor, *mems: torch.Tensor) -> list[torch.Tensor]:
            mems = mems or (torch.empty(0),) * 3
            n, past = x.size(0), mems[0].size(0)
            mask = torch.triu(torch.ones(n, past + n), 1 + past).bool()
            places = torch.arange(past + n - 1, -1, -1.0)
            waves = torch.ger(places, 1 / (10 ** (torch.arange(0.0, WIDTH, 2.0) / WIDTH)))
            r = torch.cat([waves.sin(), waves.cos()], dim=-1)
            x = self.stem(x)
            hidden = [x]
            for i, block in enumerate(self.blocks):
                x = block(x, r, mask, mems=mems[i])
                hidden.append(x)
            with torch.no_grad():
                new = [
                    torch.cat([m, h])[-4:].detach() if m.numel() else h[-4:].detach()
                    for m, h in zip(mems, hidden, strict=True)
                ]
            return [
                functional.cross_entropy(self.head(x).flatten(0, 1), y.flatten(), reduction="none").view(n, -1),
                *new,
            ]

    model = Xl()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    mems: tuple[torch.Tensor, ...] = ()
    for step in range(4):
        x, y = tokens(step)
        model.zero_grad()
        ret = model(x.transpose(0, 1), y.T, *mems)
        loss, mems = ret[0], tuple(ret[1:])
        loss.float().mean().type_as(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        t.note("memories", list(mems))
        t.end_step()


@attack(
    "recomputation",
    "tokens are hashed by drawn turns, sorted by bucket and attend within theirs, then put back in order (Reformer)",
    only=EXACT,
)
def hashed_attention(t: Trial) -> None:
    class Hashed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.qk, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, n, _ = x.shape
            y = self.norm(x)
            qk, v = self.qk(y), self.v(y)
            turns = torch.randn(WIDTH, 1, dtype=qk.dtype)
            turned = torch.einsum("btf,fi->bti", qk.detach(), turns)
            buckets = torch.argmax(torch.cat([turned, -turned], dim=-1), dim=-1)
            ticker = torch.arange(n)[None].expand_as(buckets)
            order = (n * buckets + ticker).detach().sort(-1)[1]
            undo = order.argsort(-1)
            sorted_qk, sorted_v = (each.gather(1, order[..., None].expand_as(each)) for each in (qk, v))
            q = sorted_qk.reshape(b, 2, n // 2, WIDTH)
            k, vs = functional.normalize(q, p=2, dim=-1).type_as(q), sorted_v.reshape(b, 2, n // 2, WIDTH)
            place = order.view(b, 2, n // 2)
            dots = torch.einsum("bhie,bhje->bhij", q, k) * WIDTH**-0.5
            dots.masked_fill_(place[..., None] < place[:, :, None], -1e9)
            dots.masked_fill_(place[..., None] == place[:, :, None], -5e4)
            weights = torch.exp(dots - torch.logsumexp(dots, dim=-1, keepdim=True)).type_as(dots)
            out = torch.einsum("buij,buje->buie", functional.dropout(weights, 0.1, self.training), vs).reshape(
                b, n, WIDTH
            )
            x = x + self.o(out.gather(1, undo[..., None].expand_as(out)))
            return x + self.inner(x)

    model = Net([Hashed(), Hashed()])
    train(t, model, adamw(model), num_steps=4)


@attack(
    "parts",
    "a bank of features by example: its constant is the mean of the first batch, rows are written by the forward (instance discrimination)",
    only=EXACT,
)
def bank_with_constant(t: Trial) -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("params", torch.tensor([3, 0.2, -1, 0.5]))
            self.register_buffer("memory", functional.normalize(torch.rand(12, NUM_CLASSES).mul_(2).add_(-1)))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            count, tau, z, momentum = (
                int(self.params[0]),
                self.params[1].item(),
                self.params[2].item(),
                self.params[3].item(),
            )
            index = torch.randint(0, 12, (len(x), count + 1))
            index.select(1, 0).copy_(y.data)
            weight = torch.index_select(self.memory, 0, index.view(-1)).detach().view(len(x), count + 1, -1)
            out = torch.bmm(weight, x.view(len(x), -1, 1))
            out.div_(tau).exp_()
            if z < 0:
                self.params[2] = out.mean() * 12
                z = self.params[2].clone().item()
            out = torch.div(out, z).view(len(x), count + 1)
            with torch.no_grad():
                rows = torch.index_select(self.memory, 0, y.view(-1))
                rows.mul_(momentum).add_(x.data, alpha=1 - momentum)
                self.memory.index_copy_(0, y, functional.normalize(rows))
            positive = out.select(1, 0)
            noise = count / 12
            first = torch.div(positive, positive + noise + 1e-7).log()
            rest = torch.div(torch.full_like(out[:, 1:], noise), out.narrow(1, 1, count) + noise + 1e-7).log()
            return -(first.sum(0) + rest.view(-1, 1).sum(0)) / len(x)

    class Discriminating(Net):
        def __init__(self) -> None:
            super().__init__()
            self.average = Average()

        def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return self.average(functional.normalize(self.head(self.features(x).mean(1))), index)[0]

    model = Discriminating()
    train(t, model, sgd(model), num_steps=4, batch=lambda step: (tokens(step)[0], torch.arange(4) + 4 * (step % 3)))


@attack(
    "parts",
    "queries meet boxes by an assignment found on the processor with numpy, after every layer, other queries are no object (DETR)",
    only=EXACT,
)
def assigned_on_the_processor(t: Trial) -> None:
    def assigned(cost: np.ndarray) -> list[tuple[int, int]]:
        # Optimal for two targets by trying all pairs, as scipy is not needed for that.
        rows = range(cost.shape[0])
        best = min(((cost[i, 0] + cost[j, 1], (i, j)) for i in rows for j in rows if i != j), key=lambda pair: pair[0])
        return [(best[1][0], 0), (best[1][1], 1)]

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.cross = (nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2))
            self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

        def forward(self, target: torch.Tensor, memory: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            q = target + places
            target = self.norms[0](target + self.own(q, q, value=target)[0])
            return self.norms[1](target + self.cross(target + places, memory, value=memory)[0])

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.queries = nn.Linear(WIDTH, WIDTH), nn.Embedding(5, WIDTH)
            self.blocks = nn.ModuleList([Layer(), Layer()])
            self.head, self.boxes = nn.Linear(WIDTH, NUM_CLASSES + 1), nn.Linear(WIDTH, 4)

        def forward(self, x: torch.Tensor) -> list[dict[str, torch.Tensor]]:
            memory, places = self.stem(x), self.queries.weight.unsqueeze(0).repeat(len(x), 1, 1)
            target, found = torch.zeros_like(places), []
            for block in self.blocks:
                target = block(target, memory, places)
                found.append({"logits": self.head(target), "boxes": self.boxes(target).sigmoid()})
            return found

    def matched(output: dict[str, torch.Tensor], labels: torch.Tensor, boxes: torch.Tensor) -> list[tuple[Any, Any]]:
        with torch.no_grad():
            shares = output["logits"].softmax(-1)
            found = []
            for b in range(len(labels)):
                cost = 5 * torch.cdist(output["boxes"][b], boxes[b], p=1) - shares[b][:, labels[b]]
                pairs = assigned(cost.cpu().numpy())
                found.append(([i for i, _ in pairs], [j for _, j in pairs]))
            return found

    model = Detector()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in model.named_parameters() if "stem" not in n]},
            {"params": model.stem.parameters(), "lr": 1e-3},
        ],
        lr=1e-2,
    )
    t.apply(model, optimizer)
    weight = torch.ones(NUM_CLASSES + 1)
    weight[-1] = 0.1
    for step in range(3):
        x, y = tokens(step)
        labels, boxes = y[:, :2], x[:, :2, :4].sigmoid()
        outputs, total = model(x), torch.zeros(())
        for output in outputs:
            pairs = matched(output, labels, boxes)
            classes = torch.full(output["logits"].shape[:2], NUM_CLASSES)
            for b, (i, j) in enumerate(pairs):
                classes[b, i] = labels[b, j]
            total = total + functional.cross_entropy(output["logits"].transpose(1, 2), classes, weight)
            sources = torch.cat([output["boxes"][b, i] for b, (i, _) in enumerate(pairs)])
            targets = torch.cat([boxes[b, j] for b, (_, j) in enumerate(pairs)])
            total = total + 5 * functional.l1_loss(sources, targets, reduction="none").sum() / max(len(targets), 1)
        optimizer.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        t.note("total", total)
        t.end_step()


@attack(
    "gradients",
    "rates and momentum of groups are interpolated by numpy in a warm-up, accumulation grows with them, sizes are drawn by Python (YOLO)",
    only=EXACT,
)
def interpolated_warm_up(t: Trial) -> None:
    import random

    model = Images()
    ema = copy.deepcopy(model).eval().requires_grad_(False)
    groups: tuple[list[Any], ...] = ([], [], [])
    for module in model.modules():
        if hasattr(module, "bias") and isinstance(module.bias, nn.Parameter):
            groups[2].append(module.bias)
        if hasattr(module, "weight") and isinstance(module.weight, nn.Parameter):
            groups[0 if module.weight.ndim > 2 else 1].append(module.weight)
    optimizer = torch.optim.SGD(groups[2], lr=0.05, momentum=0.9, nesterov=True)
    optimizer.add_param_group({"params": groups[0], "weight_decay": 5e-4})
    optimizer.add_param_group({"params": groups[1], "weight_decay": 0.0})
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    t.track(ema)
    t.apply(model, optimizer)
    updates, last = 0, -1
    for ni in range(9):
        bounds = [0, 6]
        accumulate = max(1, np.interp(ni, bounds, [1, 3]).round())
        for j, group in enumerate(optimizer.param_groups):
            group["lr"] = float(np.interp(ni, bounds, [0.1 if j == 0 else 0.0, group["initial_lr"]]))
            group["momentum"] = float(np.interp(ni, bounds, [0.8, 0.9]))
        x, y = images(ni)
        size = random.randrange(6, 12) // 2 * 2
        if size != 8:
            x = functional.interpolate(x, size=(size, size), mode="bilinear", align_corners=False)
        loss = model(x, y) * len(x)
        loss.backward()
        if ni - last >= accumulate:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                updates += 1
                d = 0.9 * (1 - math.exp(-updates / 3))
                state = model.state_dict()
                for k, value in ema.state_dict().items():
                    if value.dtype.is_floating_point:
                        value.mul_(d).add_((1 - d) * state[k].detach())
            last = ni
        t.note("loss", loss)
        t.end_step()


@attack(
    "second order",
    "a clone's parameters are tensors with a graph, set module by module, moved along gradients and used again (learn2learn)",
    only=EXACT,
)
def cloned_for_inner_steps(t: Trial) -> None:
    def clone(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        made = module.__new__(type(module))
        made.__dict__ = module.__dict__.copy()
        made._parameters, made._buffers, made._modules = (
            dict(getattr(made, n)) for n in ("_parameters", "_buffers", "_modules")
        )
        for name, p in module._parameters.items():
            if p is not None:
                made._parameters[name] = memo.setdefault(p.data_ptr(), p.clone())
        for name, child in module._modules.items():
            made._modules[name] = clone(child, memo)
        return made

    def moved(module: nn.Module, updates: dict[int, torch.Tensor]) -> None:
        for name, p in module._parameters.items():
            if p is not None and id(p) in updates:
                module._parameters[name] = p + updates[id(p)]
        for child in module._modules.values():
            moved(child, updates)

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    t.apply(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        total = torch.zeros(())
        for task in range(2):
            x, y = tokens(2 * step + task)
            learner = clone(model, {})
            for _ in range(2):
                error = learner(x[:2], y[:2])
                params = list(learner.parameters())
                grads = torch.autograd.grad(error, params, create_graph=True)
                moved(learner, {id(p): -0.1 * g for p, g in zip(params, grads, strict=True)})
            error = learner(x[2:], y[2:])
            error.backward()
            total = total + error.detach()
        for p in model.parameters():
            p.grad.data.mul_(1.0 / 2)
        optimizer.step()
        t.note("total", total)
        t.end_step()


@attack(
    "second order",
    "a context vector on the model starts at zero for each task and is moved in inner steps, weights in the outer ones (CAVIA)",
    only=EXACT,
)
def context_vectors(t: Trial) -> None:
    class Contextual(Net):
        def __init__(self) -> None:
            super().__init__()
            self.context: Any = torch.zeros(4, requires_grad=True)
            self.film = nn.Linear(4, 2 * WIDTH)

        def reset(self) -> None:
            self.context = self.context.detach() * 0
            self.context.requires_grad = True

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            scale, shift = self.film(self.context).chunk(2)
            return self.loss(self.head(self.features(x) * (1 + scale) + shift), y)

    model = Contextual()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    t.apply(model, optimizer)
    for step in range(3):
        gradients: list[Any] = [0 for _ in model.parameters()]
        for task in range(2):
            x, y = tokens(2 * step + task)
            model.reset()
            for _ in range(2):
                loss = model(x[:2], y[:2])
                grad = torch.autograd.grad(loss, model.context, create_graph=True)[0]
                model.context = model.context - 1.0 * grad
            outer = model(x[2:], y[2:])
            for i, g in enumerate(torch.autograd.grad(outer, model.parameters())):
                gradients[i] = gradients[i] + g.detach().clamp_(-10, 10)
        for i, p in enumerate(model.parameters()):
            p.grad = gradients[i] / 2
        optimizer.step()
        model.reset()
        t.note("outer", outer)
        t.end_step()
