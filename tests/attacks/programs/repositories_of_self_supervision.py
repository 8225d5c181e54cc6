"""Self-supervision as its repositories have it: centres, prototypes, schedules of momentum, masks in place, targets from upper layers."""

import copy
import math
from typing import Any

import torch
from tests.attacks.models import NUM_CLASSES, WIDTH, Block, Net, adamw, sgd, tokens
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


class _Encoder(Net):
    """Features and a projection of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).mean(1))


@attack(
    "gradients",
    "gradients of the last layer are taken away by name in the first epoch, each clipped by its norm, decay by group number (DINO)",
    only=EXACT,
)
def last_layer_waits(t: Trial) -> None:
    class Student(Net):
        def __init__(self) -> None:
            super().__init__()
            self.last_layer = nn.utils.weight_norm(nn.Linear(NUM_CLASSES, 5, bias=False))
            self.last_layer.weight_g.data.fill_(1)
            self.last_layer.weight_g.requires_grad = False

        def forward(self, crops: list[torch.Tensor]) -> torch.Tensor:
            lengths = torch.cumsum(
                torch.unique_consecutive(torch.tensor([c.shape[1] for c in crops]), return_counts=True)[1], 0
            )
            begin, found = 0, torch.empty(0)
            for end in lengths.tolist():
                out = self.features(torch.cat(crops[begin:end])).mean(1)
                found, begin = torch.cat((found, out)), end
            return self.last_layer(functional.normalize(functional.gelu(self.head(found)), dim=-1, p=2))

    student, teacher = Student(), Student()
    teacher.load_state_dict(student.state_dict())
    for p in teacher.parameters():
        p.requires_grad = False
    regularized = [p for p in student.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in student.parameters() if p.requires_grad and p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": regularized}, {"params": others, "weight_decay": 0.0}])
    t.track(teacher)
    t.apply(student, optimizer)
    centre = torch.zeros(1, 5)
    decays = [0.04 + 0.3 * (1 - math.cos(math.pi * i / 6)) for i in range(6)]
    for step in range(6):
        for i, group in enumerate(optimizer.param_groups):
            group["lr"] = 1e-2 * min(1.0, (step + 1) / 3)
            if i == 0:
                group["weight_decay"] = decays[step]
        x = tokens(step)[0]
        crops = [x, x.flip(2), x[:, :3], x[:, 3:]]
        aimed, answered = teacher(crops[:2]), student(crops)
        answers = (answered / 0.1).chunk(4)
        targets = functional.softmax((aimed - centre) / 0.05, dim=-1).detach().chunk(2)
        total, terms = torch.zeros(()), 0
        for i, target in enumerate(targets):
            for v, answer in enumerate(answers):
                if v != i:
                    total = total + torch.sum(-target * functional.log_softmax(answer, dim=-1), dim=-1).mean()
                    terms += 1
        with torch.no_grad():
            centre = centre * 0.9 + torch.sum(aimed, dim=0, keepdim=True) / len(aimed) * 0.1
        optimizer.zero_grad()
        (total / terms).backward()
        norms = []
        for p in student.parameters():
            if p.grad is not None:
                norm = p.grad.data.norm(2)
                norms.append(norm.item())
                coefficient = 0.3 / (norm + 1e-6)
                if coefficient < 1:
                    p.grad.data.mul_(coefficient)
        if step < 2:
            for name, p in student.named_parameters():
                if "last_layer" in name:
                    p.grad = None
        optimizer.step()
        with torch.no_grad():
            for q, k in zip(student.parameters(), teacher.parameters(), strict=True):
                k.data.mul_(0.9).add_((1 - 0.9) * q.detach().data)
        t.note("centre", centre)
        t.end_step()


@attack(
    "recomputation",
    "masked tokens are written into the embedded input in place, a class token before them; losses of both (iBOT)",
    only=EXACT,
)
def masked_in_place(t: Trial) -> None:
    class Masked(Net):
        def __init__(self) -> None:
            super().__init__()
            self.masked = nn.Parameter(torch.zeros(1, WIDTH))
            self.cls = nn.Parameter(torch.full((1, 1, WIDTH), 0.1))

        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.stem(x)
            if mask is not None:
                x[mask] = self.masked.to(x.dtype)
            x = torch.cat((self.cls.expand(len(x), -1, -1), x), dim=1)
            x = self.head(self.blocks(x))
            return x[:, 0], x[:, 1:]

    student = Masked()
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = adamw(student)
    t.track(teacher)
    t.apply(student, optimizer)
    for step in range(4):
        x = tokens(step)[0]
        mask = torch.rand(x.shape[:2]) < 0.4
        cls, patches = student(x, mask)
        aimed_cls, aimed = teacher(x)
        both = torch.sum(-functional.softmax(aimed / 0.07, -1) * functional.log_softmax(patches / 0.1, -1), dim=-1)
        of_patches = torch.sum(both * mask.to(x.dtype), dim=-1) / mask.sum(dim=-1).clamp(min=1.0)
        of_cls = torch.sum(-functional.softmax(aimed_cls / 0.07, -1) * functional.log_softmax(cls / 0.1, -1), dim=-1)
        loss = of_cls.mean() + of_patches.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for q, k in zip(student.parameters(), teacher.parameters(), strict=True):
                k.data.mul_(0.9).add_(q.data, alpha=0.1)
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "prototypes are normalised in place before each forward, their gradients dropped at first, codes by Sinkhorn with a queue (SwAV)",
    only=EXACT,
)
def frozen_prototypes(t: Trial) -> None:
    class Swapped(Net):
        def __init__(self) -> None:
            super().__init__()
            self.prototypes = nn.Linear(NUM_CLASSES, 5, bias=False)

        def forward(self, views: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            x = functional.normalize(self.head(self.features(torch.cat(views)).mean(1)), dim=1, p=2)
            return x, self.prototypes(x)

    def codes(out: torch.Tensor) -> torch.Tensor:
        q = torch.exp(out / 0.3).t()
        q /= torch.sum(q)
        for _ in range(3):
            q /= torch.sum(q, dim=1, keepdim=True)
            q /= q.shape[0]
            q /= torch.sum(q, dim=0, keepdim=True)
            q /= q.shape[1]
        return (q * q.shape[1]).t()

    model = Swapped()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    queue = torch.zeros(2, 8, NUM_CLASSES)
    t.writes_within_step("prototypes.weight")
    for step in range(6):
        with torch.no_grad():
            w = model.prototypes.weight.data.clone()
            w = functional.normalize(w, dim=1, p=2)
            model.prototypes.weight.copy_(w)
        x = tokens(step)[0]
        embedding, output = model([x, x.flip(1) + 0.1])
        embedding = embedding.detach()
        loss = torch.zeros(())
        for i in range(2):
            with torch.no_grad():
                out = output[4 * i : 4 * (i + 1)].detach()
                if step >= 2:
                    out = torch.cat((torch.mm(queue[i], model.prototypes.weight.t()), out))
                queue[i, 4:] = queue[i, :-4].clone()
                queue[i, :4] = embedding[4 * i : 4 * (i + 1)]
                q = codes(out)[-4:]
            j = 1 - i
            p = output[4 * j : 4 * (j + 1)] / 0.1
            loss = loss - torch.mean(torch.sum(q * functional.log_softmax(p, dim=1), dim=1))
        optimizer.zero_grad()
        (loss / 2).backward()
        if step < 2:
            for name, p in model.named_parameters():
                if "prototypes" in name:
                    p.grad = None
        optimizer.step()
        t.note("queue", queue)
        t.end_step()


@attack(
    "gradients", "two views and a predictor whose rate stays as it is while the other's falls (SimSiam)", only=EXACT
)
def predictor_with_fixed_rate(t: Trial) -> None:
    class Siamese(Net):
        def __init__(self) -> None:
            super().__init__()
            self.predictor = nn.Sequential(
                nn.Linear(NUM_CLASSES, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, NUM_CLASSES)
            )
            self.norm = nn.BatchNorm1d(NUM_CLASSES, affine=False)
            self.head.bias.requires_grad = False

        def forward(self, one: torch.Tensor, two: torch.Tensor) -> tuple[torch.Tensor, ...]:
            z1, z2 = (self.norm(self.head(self.features(each).mean(1))) for each in (one, two))
            return self.predictor(z1), self.predictor(z2), z1.detach(), z2.detach()

    model = Siamese()
    own = [p for n, p in model.named_parameters() if "predictor" not in n and p.requires_grad]
    groups = [{"params": own, "fix_lr": False}, {"params": model.predictor.parameters(), "fix_lr": True}]
    optimizer = torch.optim.SGD(groups, 0.05, momentum=0.9, weight_decay=1e-4)
    t.apply(model, optimizer)
    similarity = nn.CosineSimilarity(dim=1)
    for step in range(5):
        rate = 0.05 * 0.5 * (1.0 + math.cos(math.pi * step / 5))
        for group in optimizer.param_groups:
            group["lr"] = 0.05 if group.get("fix_lr") else rate
        x = tokens(step)[0]
        p1, p2, z1, z2 = model(x, x + 0.1 * torch.randn_like(x))
        loss = -(similarity(p1, z2).mean() + similarity(p2, z1).mean()) * 0.5
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


class _Lars(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float, weight_decay: float, momentum: float, filters: bool) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "filters": filters})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for g in self.param_groups:
            for p in g["params"]:
                dp = p.grad
                if dp is None:
                    continue
                if not g["filters"] or p.ndim > 1:
                    dp = dp.add(p, alpha=g["weight_decay"])
                    norm, update = torch.norm(p), torch.norm(dp)
                    one = torch.ones_like(norm)
                    q = torch.where(norm > 0.0, torch.where(update > 0, 0.02 * norm / update, one), one)
                    dp = dp.mul(q)
                state = self.state[p]
                if "mu" not in state:
                    state["mu"] = torch.zeros_like(p)
                mu = state["mu"]
                mu.mul_(g["momentum"]).add_(dp)
                p.add_(mu, alpha=-g["lr"])


@attack(
    "parts",
    "variance, invariance and covariance of two views, with LARS written by hand, rates set before each forward (VICReg)",
)
def variance_and_covariance(t: Trial) -> None:
    class Expanding(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x, y = (self.head(self.features(each).mean(1)) for each in (x, y))
            near = functional.mse_loss(x, y)
            x, y = x - x.mean(dim=0), y - y.mean(dim=0)
            spread = sum(torch.mean(functional.relu(1 - torch.sqrt(each.var(dim=0) + 1e-4))) / 2 for each in (x, y))
            off = torch.zeros(())
            for each in (x, y):
                c = (each.T @ each) / (len(each) - 1)
                n = len(c)
                off = off + c.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten().pow_(2).sum().div(n)
            return 25.0 * near + 25.0 * spread + off

    model = Expanding()
    optimizer = _Lars(model.parameters(), lr=0.0, weight_decay=1e-6, momentum=0.9, filters=True)
    t.apply(model, optimizer)
    for step in range(5):
        for group in optimizer.param_groups:
            group["lr"] = 0.2 * (step + 1) / 5
        x = tokens(step)[0]
        optimizer.zero_grad()
        loss = model(x, x + 0.2 * torch.randn_like(x))
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "context tokens are gathered by masks, a predictor fills in targets of a slow encoder, schedules are generators (I-JEPA)",
    only=EXACT,
)
def joint_embeddings(t: Trial) -> None:
    def gathered(x: torch.Tensor, masks: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([torch.gather(x, 1, m.unsqueeze(-1).repeat(1, 1, x.size(-1))) for m in masks])

    class Encoder(Net):
        def forward(self, x: torch.Tensor, masks: list[torch.Tensor] | None = None) -> torch.Tensor:
            x = self.stem(x)
            if masks is not None:
                x = gathered(x, masks)
            return functional.layer_norm(self.blocks(x), (WIDTH,))

    class Predictor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
            self.register_buffer("places", torch.linspace(0, 1, 6)[None, :, None].repeat(1, 1, WIDTH))
            self.block = Block()

        def forward(self, x: torch.Tensor, kept: list[torch.Tensor], wanted: list[torch.Tensor]) -> torch.Tensor:
            b = len(x) // len(kept)
            x = x + gathered(self.places.repeat(b, 1, 1), kept)
            places = gathered(self.places.repeat(b, 1, 1), wanted)
            x = torch.cat([x.repeat(len(wanted), 1, 1), self.mask_token + places], dim=1)
            return self.block(x)[:, kept[0].shape[1] :]

    encoder, predictor = Encoder(), Predictor()
    target = copy.deepcopy(encoder)
    for p in target.parameters():
        p.requires_grad = False
    optimizer = torch.optim.AdamW([*encoder.parameters(), *predictor.parameters()], lr=1e-2)
    t.track(target)
    t.track(predictor)
    t.apply(encoder, optimizer)
    momentum = (0.9 + i * 0.02 for i in range(5))
    for step in range(5):
        x = tokens(step)[0]
        order = torch.stack([torch.randperm(6) for _ in range(len(x))])
        kept, wanted = [order[:, :3]], [order[:, 3:5], order[:, 4:]]
        with torch.no_grad():
            h = gathered(functional.layer_norm(target(x), (WIDTH,)), wanted)
        loss = functional.smooth_l1_loss(predictor(encoder(x, kept), kept, wanted), h)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            m = next(momentum)
            for q, k in zip(encoder.parameters(), target.parameters(), strict=True):
                k.data.mul_(m).add_((1.0 - m) * q.detach().data)
        t.note("loss", loss)
        t.end_step()


@attack(
    "recomputation",
    "targets are the mean of upper blocks' outputs of an averaged teacher that lives in the model, normalised over tokens (data2vec)",
    only=EXACT,
)
def upper_layers_as_targets(t: Trial) -> None:
    class Data(Net):
        def __init__(self) -> None:
            super().__init__([Block() for _ in range(3)], sequential=False)
            self.mask = nn.Parameter(torch.rand(WIDTH))
            self.ema: Any = None
            self.num_updates = 0
            self.regress = nn.Linear(WIDTH, WIDTH)

        def set_num_updates(self, number: int) -> None:
            if self.ema is None and number == 0:
                # Held past the module tree, as there: it is not among the parameters.
                self.__dict__["ema"] = copy.deepcopy(self.blocks).requires_grad_(False)
            elif self.training and self.ema is not None:
                decay = 0.9 + 0.01 * min(number, 5)
                for q, k in zip(self.blocks.parameters(), self.ema.parameters(), strict=True):
                    k.data.mul_(decay).add_(q.data.to(k.dtype), alpha=1 - decay)
            self.num_updates = number

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            before = x.detach().clone()
            masked = torch.rand(x.shape[:2]) < 0.5
            x = torch.where(masked[..., None], self.mask.to(x.dtype), x)
            for block in self.blocks:
                x = block(x)
            with torch.no_grad():
                self.ema.eval()
                layers = []
                for block in self.ema:
                    before = block(before)
                    layers.append(before)
                upper = [functional.instance_norm(each.transpose(1, 2)).transpose(1, 2) for each in layers[-2:]]
                aimed = sum(upper) / len(upper)
            return functional.mse_loss(self.regress(x)[masked], aimed[masked], reduction="none").sum()

    model = Data()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    model.set_num_updates(0)
    for step in range(4):
        loss = model(tokens(step)[0]) / 50
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.set_num_updates(step + 1)
        t.note("average", list(model.ema.parameters())[:2])
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "each batch a random part of examples goes on, by losses of a forward in evaluation without gradients (selective backprop)",
    only=EXACT,
)
def selective_backprop(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(6):
        x, y = tokens(step)
        if step >= 2:
            with torch.no_grad():
                was = model.training
                model.eval()
                losses = functional.cross_entropy(model(x).transpose(1, 2), y, reduction="none").mean(1)
                model.train(was)
                ranks = torch.argsort(torch.argsort(losses)) / len(losses)
                chances = (ranks + 0.1) ** 2
                chosen = torch.multinomial(chances / chances.sum(), 2, replacement=False)
                t.note("chosen", chosen)
            x, y = x[chosen], y[chosen]
        loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.end_step()


@attack(
    "changes",
    "optimizers take turns within one loop, whose other parameters are frozen for the time, by a dict of flags (manual optimization)",
)
def toggled_optimizers(t: Trial) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(Block(), Block())
            self.head = nn.Linear(WIDTH, NUM_CLASSES)

    model = Pair()
    body = torch.optim.Adam(model.blocks.parameters(), lr=1e-2)
    head = torch.optim.Adam(model.head.parameters(), lr=1e-2)
    t.apply(model, body, head)
    state: dict[torch.Tensor, bool] = {}

    def toggle(optimizer: torch.optim.Optimizer) -> None:
        for each in (body, head):
            for group in each.param_groups:
                for p in group["params"]:
                    if p not in state:
                        state[p] = p.requires_grad
                    p.requires_grad = False
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.requires_grad = state[p]

    def untoggle(optimizer: torch.optim.Optimizer) -> None:
        for each in (body, head):
            if each is not optimizer:
                for group in each.param_groups:
                    for p in group["params"]:
                        if p in state:
                            p.requires_grad = state[p]
        state.clear()

    for step in range(4):
        x, y = tokens(step)
        toggle(body)
        loss = functional.cross_entropy(model.head(model.blocks(x)).flatten(0, 1), y.flatten())
        body.zero_grad()
        loss.backward()
        body.step()
        untoggle(body)
        toggle(head)
        other = functional.cross_entropy(model.head(model.blocks(x)).flatten(0, 1), y.flatten(), label_smoothing=0.1)
        head.zero_grad()
        other.backward()
        head.step()
        untoggle(head)
        t.note("losses", torch.stack([loss, other]))
        t.end_step()


@attack(
    "parts",
    "a pairwise sigmoid loss whose negatives come chunk by chunk, with a learned scale and bias of no dimension (SigLIP)",
    only=EXACT,
)
def pairwise_sigmoid(t: Trial) -> None:
    model, texts = _Encoder(), _Encoder()
    scale, bias = nn.Parameter(torch.ones([]) * math.log(10)), nn.Parameter(torch.ones([]) * -2)
    optimizer = torch.optim.AdamW([*model.parameters(), *texts.parameters(), scale, bias], lr=1e-2)
    t.track(texts)
    t.apply(model, optimizer)
    for step in range(4):
        x = tokens(step)[0]
        a, b = functional.normalize(model(x), dim=-1), functional.normalize(texts(x.flip(1)), dim=-1)
        loss = torch.zeros(())
        for i, part in enumerate(b.chunk(2)):
            logits = scale.exp() * a @ part.T + bias
            labels = -torch.ones_like(logits)
            labels[range(2 * i, 2 * i + 2), range(2)] = 1.0
            loss = loss - functional.logsigmoid(labels * logits).sum() / len(a)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            scale.clamp_(0, math.log(100))
        t.note("scale", torch.stack([scale, bias]))
        t.end_step()
