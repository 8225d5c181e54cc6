"""Training recipes as published code has them: language models, detection, diffusion, teachers and students, with everything around them."""

import copy
import math
import random
from typing import Any

import torch
from tests.attacks.models import (
    BATCH,
    NUM_CLASSES,
    TOKENS,
    WIDTH,
    Block,
    Images,
    Net,
    adamw,
    images,
    sgd,
    tokens,
    train,
)
from tests.attacks.places import BITWISE, EXACT, WITHOUT_TILES
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class _Causal(nn.Module):
    """Attention as nanoGPT has it, by hand, with its mask in a buffer."""

    is_attention = True

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attn_dropout, self.n_head = nn.Dropout(dropout), 2
        self.register_buffer("bias", torch.tril(torch.ones(TOKENS, TOKENS)).view(1, 1, TOKENS, TOKENS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens that have looked at those before them."""
        B, T, C = x.size()
        q, k, v = (e.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for e in self.c_attn(x).split(C, dim=2))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = self.attn_dropout(functional.softmax(att, dim=-1)) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class _GptBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), _Causal(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens of the same shape."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class _Gpt(nn.Module):
    """nanoGPT: learned positions, a tied head, the loss over targets where there are any, and the last token's logits otherwise."""

    returns_loss = True

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(NUM_CLASSES, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(_GptBlock() for _ in range(2))
        self.ln_f, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NUM_CLASSES, bias=False)
        self.wte.weight = self.head.weight

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        """Logits and the loss."""
        assert idx.size(1) <= TOKENS, f"Cannot forward sequence of length {idx.size(1)}"
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.blocks:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return self.head(x[:, [-1], :]), None
        logits = self.head(x)
        return logits, functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def _words(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator(torch.get_default_device()).manual_seed(300 + step)
    words = torch.randint(0, NUM_CLASSES, (BATCH, TOKENS + 1), generator=chance)
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


@attack(
    "clean",
    "nanoGPT's loop: tied head, decay by dimension, accumulation over two, clipping, a cosine by hand, estimate_loss",
    only=WITHOUT_TILES,
)
def nano_gpt(t: Trial) -> None:
    model = _Gpt()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    t.apply(model, optimizer)
    for step in range(4):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 + 0.5 * (1.0 + math.cos(math.pi * step / 4)) * 9e-3
        if step % 2 == 0:
            with torch.no_grad():
                model.eval()
                t.note("evaluation", torch.stack([model(*_words(50 + k))[1] for k in range(2)]).mean())
                model.train()
        for micro in range(2):
            _, loss = model(*_words(2 * step + micro))
            (loss / 2).backward()
        t.note("loss", loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        t.end_step()


@attack("parts", "nanoGPT generates words by multinomial sampling after each step", only=EXACT)
def generates_between(t: Trial) -> None:
    model = _Gpt()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(3):
        _, loss = model(*_words(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.end_step()
        said = torch.zeros(1, 1, dtype=torch.long)
        with torch.no_grad():
            while said.size(1) < TOKENS:
                logits, _ = model(said)
                said = torch.cat([said, torch.multinomial(logits[:, -1].softmax(-1), 1)], dim=1)
        t.note("said", said)


@attack("parts", "a prefix of learned tokens is put before the input, and cut off before the head (prompt tuning)")
def prompt_tuning(t: Trial) -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.prompt = nn.Parameter(torch.randn(3, WIDTH))

        def features(self, x: torch.Tensor) -> torch.Tensor:
            return super().features(torch.cat([self.prompt.expand(len(x), -1, -1), x], 1))[:, 3:]

    model = Model()
    model.requires_grad_(False)
    model.prompt.requires_grad_(True)
    train(t, model)


@attack("parts", "documents packed into one row, with a mask by document and positions that start anew")
def packed_documents(t: Trial) -> None:
    class Model(_Gpt):
        def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
            document = (idx == 0).cumsum(1)
            position = torch.arange(idx.size(1)) - (document.unsqueeze(-1) > document.unsqueeze(-2)).sum(-1)
            x = self.wte(idx) + self.wpe(position.clamp(min=0))
            for block in self.blocks:
                x = block(x)
            each = functional.cross_entropy(self.head(self.ln_f(x)).flatten(0, 1), targets.flatten(), reduction="none")
            return (each * (idx.flatten() != 0)).sum() / (idx != 0).sum()

    train(t, Model(), batch=_words)


def _dropped(x: torch.Tensor, rate: float, training: bool) -> torch.Tensor:
    if not training or rate == 0:
        return x
    return x * (torch.rand(len(x), *[1] * (x.dim() - 1)) >= rate) / (1 - rate)


@attack(
    "recomputation",
    "paths are dropped for whole examples, at a rate that grows with depth (timm's DropPath), with LayerScale",
)
def drop_path(t: Trial) -> None:
    class Path(Block):
        def __init__(self, rate: float) -> None:
            super().__init__()
            self.rate, self.gamma = rate, nn.Parameter(torch.full((WIDTH,), 0.1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + _dropped(self.inner(x) * self.gamma, self.rate, self.training)

    train(t, Net([Path(0.0), Path(0.2), Path(0.4)]))


@attack(
    "parts",
    "an autoencoder of masked patches: most tokens are left out by argsort of noise, and mask tokens put in (MAE)",
)
def masked_autoencoder(t: Trial) -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.mask = nn.Parameter(torch.zeros(WIDTH))
            self.head = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            order = torch.rand(x.shape[:2]).argsort(1)
            keep = order[:, :3].unsqueeze(-1).expand(-1, -1, WIDTH)
            seen = self.blocks(self.stem(x.gather(1, keep)))
            whole = self.mask.expand_as(x).scatter(1, keep, seen)
            each = (self.head(whole) - x).square().mean(-1)
            hidden = torch.ones_like(each).scatter(1, order[:, :3], 0.0)
            return (each * hidden).sum() / hidden.sum()

    train(t, Model(), batch=lambda step: tokens(step)[:1])


@attack("parts", "a denoiser: noise and times are drawn inside of the forward, the loss weighted by time (min-SNR)")
def diffusion_inside(t: Trial) -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.times = nn.Linear(WIDTH, WIDTH), nn.Embedding(10, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            noise, time = torch.randn_like(x), torch.randint(0, 10, (len(x),))
            share = ((time + 0.5) / 10).to(x)[:, None, None]
            seen = self.features((1 - share).sqrt() * x + share.sqrt() * noise + self.times(time).unsqueeze(1))
            each = (self.head(seen) - noise).square().mean((1, 2))
            return (each * ((1 - share) / share).clamp(max=5).flatten()).mean()

    train(t, Model(), batch=lambda step: tokens(step)[:1])


@attack(
    "parts",
    "a denoiser: noise and times come from the loop, conditions are dropped for some examples, and an average is kept",
    only=EXACT,
)
def diffusion_outside(t: Trial) -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.times, self.classes = (
                nn.Linear(WIDTH, WIDTH),
                nn.Embedding(10, WIDTH),
                nn.Embedding(NUM_CLASSES + 1, WIDTH),
            )

        def forward(
            self, x: torch.Tensor, noise: torch.Tensor, time: torch.Tensor, label: torch.Tensor
        ) -> torch.Tensor:
            share = ((time + 0.5) / 10).to(x)[:, None, None]
            given = self.times(time) + self.classes(label)
            seen = self.features((1 - share).sqrt() * x + share.sqrt() * noise + given.unsqueeze(1))
            return (self.head(seen) - noise).square().mean()

    model = Model()
    average = copy.deepcopy(model).requires_grad_(False)
    t.track(average)

    def batch(step: int) -> Any:
        x, y = tokens(step)
        label = torch.where(torch.rand(len(x)) < 0.3, NUM_CLASSES, y[:, 0])
        return x, torch.randn_like(x), torch.randint(0, 10, (len(x),)), label

    def blend(_: int) -> None:
        with torch.no_grad():
            for a, b in zip(average.parameters(), model.parameters(), strict=True):
                a.lerp_(b, 0.1)

    train(t, model, adamw(model), batch=batch, after=blend)


@attack(
    "parts",
    "a variational autoencoder: drawn codes, the divergence summed and divided by the batch, its weight raised by a counter",
)
def variational(t: Trial) -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.decoder, self.calls = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            mean, logvar = self.head(self.features(x)).chunk(2, -1)
            code = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
            far = -0.5 * (1 + logvar - mean.square() - logvar.exp()).sum()
            return ((self.decoder(code) - x).square().sum() + min(1.0, self.calls / 3) * far) / x.shape[0]

    model = Model()
    train(t, model, adamw(model, lr=1e-3), batch=lambda step: tokens(step)[:1])


@attack(
    "parts",
    "a detector: images as a list, targets as a list of dicts, losses as a dict, divided by the count of boxes in the batch (DETR)",
)
def detector(t: Trial) -> None:
    class Model(Images):
        def __init__(self) -> None:
            super().__init__()
            self.boxes = nn.Linear(4, 4)

        def forward(
            self, pictures: list[torch.Tensor], targets: list[dict[str, torch.Tensor]]
        ) -> dict[str, torch.Tensor]:
            seen = self.chain(self.stem(torch.stack(pictures))).mean((2, 3))
            scores, boxes = self.head(seen), self.boxes(seen).sigmoid()
            count = max(1, sum(len(target["boxes"]) for target in targets))
            off = [(boxes[i] - target["boxes"]).abs().sum() for i, target in enumerate(targets)]
            of_class = [
                functional.cross_entropy(scores[i].expand(len(g["labels"]), -1), g["labels"], reduction="sum")
                for i, g in enumerate(targets)
            ]
            return {"boxes": torch.stack(off).sum() / count, "classes": torch.stack(of_class).sum() / count}

    model = Model()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = images(step)
        chance = torch.Generator(torch.get_default_device()).manual_seed(step)
        counts = [1 + (step + i) % 3 for i in range(BATCH)]
        targets = [
            {"boxes": torch.rand(n, 4, generator=chance).to(x), "labels": y[i].repeat(n)} for i, n in enumerate(counts)
        ]
        losses = model(list(x), targets)
        t.note("losses", losses)
        optimizer.zero_grad()
        sum(losses.values()).backward()
        optimizer.step()
        t.end_step()


@attack(
    "parts",
    "segmentation: classes in the second dimension, a void class, an auxiliary head that is left out in evaluation",
)
def segmentation(t: Trial) -> None:
    class Model(Images):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.aux = nn.Conv2d(4, NUM_CLASSES, 1), nn.Conv2d(3, NUM_CLASSES, 1)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            loss = functional.cross_entropy(self.head(self.chain(x)), y, ignore_index=0)
            return loss + 0.4 * functional.cross_entropy(self.aux(x), y, ignore_index=0) if self.training else loss

    model = Model()

    def batch(step: int) -> Any:
        x, _ = images(step)
        return x, torch.randint(
            0, NUM_CLASSES, (len(x), 8, 8), generator=torch.Generator(torch.get_default_device()).manual_seed(step)
        )

    def evaluate(step: int) -> None:
        model.eval()
        with torch.inference_mode():
            t.note("evaluation", model(*batch(40 + step)).clone())
        model.train()

    train(t, model, batch=batch, after=evaluate)


@attack(
    "clean",
    "a loader that shuffles with torch's random numbers, random crops by Python's, two epochs, metrics of torch's own",
)
def loader_and_crops(t: Trial) -> None:
    x, y = tokens(0, batch=12)
    loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True, drop_last=True)
    model = Net()
    model.returns_loss = False
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=2)
    t.apply(model, optimizer)
    for _ in range(2):
        hits = total = 0
        for xs, ys in loader:
            start = random.randint(0, 1)
            logits = model(xs[:, start : start + 5])
            target = ys[:, start : start + 5]
            loss = functional.cross_entropy(logits.transpose(1, 2), target, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            hits, total = hits + int((logits.argmax(-1) == target).sum()), total + target.numel()
            t.note("loss", loss)
            t.end_step()
        scheduler.step()
        t.note("rate", scheduler.get_last_lr()[0])
        assert 0 <= hits <= total


@attack("clean", "autocast to bfloat16 around forward and loss, as every tutorial has it", only=BITWISE)
def autocast_around(t: Trial) -> None:
    model = Net().float()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(3):
        x, y = tokens(step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x.float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.end_step()


@attack(
    "gradients", "a GradScaler that meets an infinite gradient: the step is skipped and the scale halved", only=EXACT
)
def scaler_skips(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    t.apply(model, optimizer)
    for step in range(5):
        loss = model(*tokens(step))
        if step == 2:
            loss = loss * float("inf")
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            t.note("norm", torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        scaler.step(optimizer)
        scaler.update()
        t.note("scale", scaler.get_scale())
        t.end_step()


@attack(
    "gradients",
    "the loss is scaled by hand, gradients divided and tested before the step, the scale moved (dynamic loss scaling)",
)
def scaled_by_hand(t: Trial) -> None:
    model, scale = Net(), 8.0
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(*tokens(step)) * (float("nan") if step == 1 else 1.0)
        (loss * scale).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        if all(bool(torch.isfinite(g).all()) for g in grads):
            for g in grads:
                g.div_(scale)
            optimizer.step()
            scale *= 2
        else:
            scale /= 2
        t.note("scale", scale)
        t.end_step()


@attack(
    "parts",
    "a student learns from a teacher's logits and features, of which a layer outside of the model makes its own (FitNets)",
)
def feature_distillation(t: Trial) -> None:
    teacher = Net().eval().requires_grad_(False)
    model, adapter = Net(), nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD([*model.parameters(), *adapter.parameters()], lr=0.1, momentum=0.9)
    t.apply(model, optimizer)
    t.track(adapter)
    for step in range(4):
        x, y = tokens(step)
        with torch.no_grad():
            known, wanted = teacher.features(x), teacher(x)
        features = model.features(x)
        logits = model.head(features)
        loss = functional.kl_div((logits / 2).log_softmax(-1), (wanted / 2).softmax(-1), reduction="batchmean") * 4
        loss = loss + functional.mse_loss(adapter(features), known) + model.loss(logits, y)
        t.note("loss", loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.end_step()


@attack(
    "parts",
    "the log-probability of whole answers, better ones against worse, with a frozen copy as the reference (DPO)",
)
def preferences(t: Trial) -> None:
    model = Net()
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = adamw(model)
    t.apply(model, optimizer)

    def said(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return net(x).log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1).sum(-1)

    for step in range(4):
        x, y = tokens(step)
        with torch.no_grad():
            known = said(reference, x, y)
        ours = said(model, x, y)
        better, worse = (ours - known).chunk(2)
        loss = -functional.logsigmoid(0.5 * (better - worse)).mean()
        t.note("loss", loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.end_step()


@attack(
    "gradients",
    "a critic with a target network that moves slowly, an actor through the critic, a learned temperature (SAC)",
    only=EXACT,
)
def actor_and_critic(t: Trial) -> None:
    actor, critic = Net(), Net()
    target = copy.deepcopy(critic).requires_grad_(False)
    temperature = torch.zeros((), requires_grad=True)
    optimizers = sgd(actor, lr=0.05), sgd(critic, lr=0.05), torch.optim.SGD([temperature], lr=0.05)
    t.apply(actor, optimizers[0])
    t.apply(critic, optimizers[1])
    t.track(target)
    for step in range(4):
        x, y = tokens(step)
        with torch.no_grad():
            policy = actor(x).softmax(-1)
            value = (policy * (target(x) - temperature.exp() * policy.log())).sum(-1)
        chosen = critic(x).gather(-1, y.unsqueeze(-1)).squeeze(-1)
        loss = functional.smooth_l1_loss(chosen, 0.1 + 0.9 * value)
        optimizers[1].zero_grad()
        loss.backward()
        optimizers[1].step()
        logp = actor(x).log_softmax(-1)
        of_actor = (logp.exp() * (temperature.exp().detach() * logp - critic(x).detach())).sum(-1).mean()
        optimizers[0].zero_grad()
        of_actor.backward()
        optimizers[0].step()
        optimizers[2].zero_grad()
        (-temperature * (logp.detach().exp() * logp.detach()).sum(-1).mean()).backward()
        optimizers[2].step()
        with torch.no_grad():
            for a, b in zip(target.parameters(), critic.parameters(), strict=True):
                a.lerp_(b, 0.05)
        t.note("losses", [loss, of_actor, temperature])
        t.end_step()


@attack(
    "changes",
    "training is cut off and taken up: new objects, weights, states, schedule and random state loaded, and a plan put on again",
)
def taken_up(t: Trial) -> None:
    def made() -> Any:
        model = Net()
        optimizer = adamw(model)
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)

    model, optimizer, scheduler = made()
    session = t.apply(model, optimizer)
    for part in range(2):
        for step in range(2):
            loss = model(*tokens(2 * part + step))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            t.note("loss", loss)
            t.end_step()
        if part == 0:
            saved = copy.deepcopy([each.state_dict() for each in (model, optimizer, scheduler)])
            random_state = torch.get_rng_state()
            if session is not None:
                session.undo()
            model, optimizer, scheduler = made()
            for each, state in zip((model, optimizer, scheduler), saved, strict=True):
                each.load_state_dict(state)
            torch.set_rng_state(random_state)
            t.apply(model, optimizer)
