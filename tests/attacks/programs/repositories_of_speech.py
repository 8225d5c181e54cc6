"""Speech and sequences as their repositories have them: decoders that hear themselves, transducers, masks by numpy, flows over waves, averages that begin late."""

import random
from typing import Any

import numpy as np
import torch
from tests.attacks.models import NUM_CLASSES, WIDTH, Block, Images, Net, adamw, images, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


@attack(
    "recomputation",
    "a decoder step by step with attention to where it looked before, a prenet that always drops, a gate, frames by teacher (Tacotron)",
    only=EXACT,
)
def location_sensitive_decoder(t: Trial) -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prenet = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)])
            self.cell, self.second = nn.LSTMCell(2 * WIDTH, WIDTH), nn.LSTMCell(2 * WIDTH, WIDTH)
            self.query, self.memory = nn.Linear(WIDTH, 4, bias=False), nn.Linear(WIDTH, 4, bias=False)
            self.location, self.v = nn.Conv1d(2, 4, 3, padding=1, bias=False), nn.Linear(4, 1, bias=False)
            self.frame, self.gate = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(2 * WIDTH, 1)

        def decode(self, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self.h, self.c = self.cell(torch.cat((given, self.context), -1), (self.h, self.c))
            self.h = functional.dropout(self.h, 0.1, self.training)
            where = self.location(torch.stack((self.weights, self.weights_cum), 1)).transpose(1, 2)
            energies = self.v(torch.tanh(self.query(self.h)[:, None] + where + self.processed)).squeeze(-1)
            self.weights = functional.softmax(energies.masked_fill(self.mask, -float("inf")), dim=1)
            self.weights_cum = self.weights_cum + self.weights
            self.context = torch.bmm(self.weights.unsqueeze(1), self.given).squeeze(1)
            self.h2, self.c2 = self.second(torch.cat((self.h, self.context), -1), (self.h2, self.c2))
            both = torch.cat((self.h2, self.context), 1)
            return self.frame(both), self.gate(both)

        def forward(
            self, memory: torch.Tensor, frames: torch.Tensor, mask: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            n = len(memory)
            self.h, self.c, self.h2, self.c2, self.context = (torch.zeros(n, WIDTH) for _ in range(5))
            self.weights, self.weights_cum = torch.zeros(n, 6), torch.zeros(n, 6)
            self.given, self.processed, self.mask = memory, self.memory(memory), mask
            given = torch.cat((torch.zeros(1, n, WIDTH), frames.transpose(0, 1)))
            for layer in self.prenet:
                given = functional.dropout(functional.relu(layer(given)), p=0.5, training=True)
            found, gates = [], []
            while len(found) < len(given) - 1:
                frame, gate = self.decode(given[len(found)])
                found += [frame.squeeze(1)]
                gates += [gate.squeeze(1)]
            return torch.stack(found).transpose(0, 1), torch.stack(gates).transpose(0, 1)

    class Tacotron(Net):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = Decoder()
            self.postnet = nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH), nn.Tanh())

        def forward(self, x: torch.Tensor, frames: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
            mask = ~(torch.arange(6) < lengths[:, None])
            out, gates = self.decoder(self.features(x), frames, mask)
            after = out + self.postnet(out.transpose(1, 2)).transpose(1, 2)
            held = mask[..., None]
            out.data.masked_fill_(held, 0.0)
            after.data.masked_fill_(held, 0.0)
            gates.data.masked_fill_(mask, 1e3)
            return out, after, gates

    model = Tacotron()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-6)
    t.apply(model, optimizer)
    for step in range(3):
        x = tokens(step)[0]
        lengths = torch.tensor([6, 5, 6, 4])
        ends = (torch.arange(6) >= lengths[:, None] - 1).to(x.dtype)
        model.zero_grad()
        out, after, gates = model(x, x.flip(1), lengths)
        loss = (
            nn.MSELoss()(out, x)
            + nn.MSELoss()(after, x)
            + nn.BCEWithLogitsLoss()(gates.reshape(-1, 1), ends.view(-1, 1))
        )
        reduced = loss.item()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        t.note("reduced", torch.tensor([reduced, float(norm)]))
        t.end_step()


@attack("parts", "a transducer: joint net over frames and labels, its lattice summed by a loop in logs (RNN-T)")
def transducer(t: Trial) -> None:
    class Transducer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.Sequential(Block(), Block())
            self.embedding, self.predictor = nn.Embedding(NUM_CLASSES, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
            self.head = nn.Linear(WIDTH, NUM_CLASSES)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            frames = self.blocks(self.stem(x))
            before = functional.pad(y[:, :3], (1, 0), value=0)
            labels, _ = self.predictor(self.embedding(before))
            joint = torch.tanh(frames[:, :, None] + labels[:, None])
            logs = self.head(joint).log_softmax(-1)
            blank = logs[..., 0]
            emits = logs[:, :, :3].gather(-1, y[:, None, :3, None].expand(-1, logs.shape[1], -1, 1))[..., 0]
            rows: list[list[torch.Tensor]] = []
            for i in range(logs.shape[1]):
                row: list[torch.Tensor] = []
                for u in range(4):
                    ways = []
                    if i == u == 0:
                        ways.append(torch.zeros(len(x)))
                    if i:
                        ways.append(rows[i - 1][u] + blank[:, i - 1, u])
                    if u:
                        ways.append(row[u - 1] + emits[:, i, u - 1])
                    row.append(torch.logsumexp(torch.stack(ways), 0))
                rows.append(row)
            return -(rows[-1][-1] + blank[:, -1, -1]).mean()

    model = Transducer()
    train(t, model, adamw(model), num_steps=3)


@attack(
    "recomputation",
    "spans are masked by numpy, codes drawn with a temperature set by updates, negatives drawn by torch, features' gradient scaled (wav2vec)",
    only=EXACT,
)
def contrasted_spans(t: Trial) -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
            ctx.scale = scale
            return x.new(x)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            return gradients[0] * ctx.scale, None

    class Contrasted(Net):
        def __init__(self) -> None:
            super().__init__()
            self.mask = nn.Parameter(torch.rand(WIDTH))
            self.codes, self.choose = nn.Parameter(torch.rand(1, 4, WIDTH)), nn.Linear(WIDTH, 4)
            self.temperature = 2.0
            self.head = nn.Linear(WIDTH, WIDTH)

        def set_num_updates(self, number: int) -> None:
            self.temperature = max(2.0 * 0.8**number, 0.5)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            features = self.stem(x)
            if self.training:
                features = Scaled.apply(features, 0.1)
            penalty = features.float().pow(2).mean()
            mask = np.full(x.shape[:2], False)
            for row in mask:
                begin = np.random.choice(4, 2, replace=False)
                row[np.unique(np.asarray([b + o for b in begin for o in range(2)]))] = True
            masked = torch.from_numpy(mask)
            given = features.clone()
            given[masked] = self.mask.to(given.dtype)
            out = self.head(self.blocks(given))
            rows = features.reshape(-1, WIDTH)
            logits = self.choose(rows)
            shares = torch.softmax(logits, -1).mean(0)
            chosen = functional.gumbel_softmax(logits, tau=self.temperature, hard=True)
            quantized = (chosen.unsqueeze(-1) * self.codes).sum(1).view(features.shape)
            perplexity = torch.exp(-torch.sum(shares * torch.log(shares + 1e-7)))
            with torch.no_grad():
                places = torch.randint(low=0, high=5, size=(len(x), 6 * 3))
                own = torch.arange(6).unsqueeze(-1).expand(-1, 3).flatten()
                places[places >= own] += 1
                places = places + torch.arange(len(x)).unsqueeze(-1) * 6
            negatives = quantized.view(-1, WIDTH)[places.view(-1)].view(len(x), 6, 3, WIDTH).permute(2, 0, 1, 3)
            all_targets = torch.cat([quantized.unsqueeze(0), negatives])
            near = torch.cosine_similarity(out, all_targets, dim=-1) / 0.1
            same = (quantized == negatives).all(-1)
            if same.any():
                near[1:][same] = float("-inf")
            near = near.permute(1, 2, 0)[masked]
            return {"logits": near, "perplexity": perplexity, "penalty": penalty}

    model = Contrasted()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.98))
    t.apply(model, optimizer)
    for step in range(4):
        model.train()
        model.set_num_updates(step)
        optimizer.zero_grad()
        out = model(tokens(step)[0])
        logits = out["logits"]
        loss = functional.cross_entropy(logits, logits.new_zeros(len(logits), dtype=torch.long), reduction="sum")
        size = len(logits)
        extra = 0.1 * size * (4 - out["perplexity"]) / 4 + 10 * size * out["penalty"]
        (loss + extra).backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad.data.mul_(1 / size)
        optimizer.step()
        t.note("temperature", model.temperature)
        t.note("loss", loss)
        t.end_step()


@attack(
    "recomputation",
    "half steps around a convolution with batch norm and gated units, spectra masked in the model by Python's random (Conformer)",
)
def conformer(t: Trial) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = Block(), Block()
            self.norm, self.wide = nn.LayerNorm(WIDTH), nn.Conv1d(WIDTH, 2 * WIDTH, 1)
            self.depth = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
            self.batch, self.out = nn.BatchNorm1d(WIDTH), nn.Conv1d(WIDTH, WIDTH, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + 0.5 * self.first.inner(x)
            y = functional.glu(self.wide(self.norm(x).transpose(1, 2)), dim=1)
            x = x + self.out(functional.silu(self.batch(self.depth(y)))).transpose(1, 2)
            return x + 0.5 * self.last.inner(x)

    class Recogniser(Net):
        def __init__(self) -> None:
            super().__init__([Half(), Half()])

        def features(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                x = x.clone()
                for i in range(len(x)):
                    begin = random.randint(0, 4)
                    x[i, begin : begin + random.randint(0, 2), :] = 0
                    band = random.randint(0, WIDTH - 2)
                    x[i, :, band : band + random.randint(0, 2)] = 0
            return super().features(x)

    model = Recogniser()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        logs = model(x).log_softmax(-1).transpose(0, 1)
        labels = y[:, :2].clamp(min=1)
        loss = functional.ctc_loss(logs, labels, torch.full((4,), 6), torch.full((4,), 2), zero_infinity=True)
        if torch.isnan(loss) or torch.isinf(loss):
            continue
        loss.backward()
        if nn.utils.clip_grad_norm_(model.parameters(), 5.0).isfinite():
            optimizer.step()
        optimizer.zero_grad()
        t.note("loss", loss)
        t.end_step()


@attack(
    "changes",
    "a flow over waves: scripted gates, parts put out early, weights by weight norm that is taken off for an evaluation copy (WaveGlow)",
    only=EXACT,
)
def flow_over_waves(t: Trial) -> None:
    class Coupled(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            w = torch.linalg.qr(torch.randn(width, width))[0]
            if torch.det(w) < 0:
                w[:, 0] = -1 * w[:, 0]
            self.mix = nn.Conv1d(width, width, 1, bias=False)
            self.mix.weight.data = w.view(width, width, 1).contiguous()
            half = width // 2
            self.start = nn.utils.weight_norm(nn.Conv1d(half, 8, 1))
            self.layer = nn.utils.weight_norm(nn.Conv1d(8, 16, 3, padding=1))
            self.end = nn.Conv1d(8, 2 * half, 1)
            self.end.weight.data.zero_()
            self.end.bias.data.zero_()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logdet = len(x) * x.size(2) * torch.logdet(self.mix.weight.squeeze())
            x = self.mix(x)
            half = x.size(1) // 2
            a, b = x[:, :half, :], x[:, half:, :]
            gates = self.layer(self.start(a))
            out = self.end(torch.tanh(gates[:, :8]) * torch.sigmoid(gates[:, 8:]))
            log_s, shift = out[:, half:, :], out[:, :half, :]
            return torch.cat([a, torch.exp(log_s) * b + shift], 1), log_s, logdet

    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Coupled(8), Coupled(8), Coupled(6)])

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
            x, out, scales, dets = x.transpose(1, 2), [], [], []
            for i, block in enumerate(self.blocks):
                if i == 2:
                    out.append(x[:, :2, :])
                    x = x[:, 2:, :]
                x, log_s, det = block(x)
                scales.append(log_s)
                dets.append(det)
            out.append(x)
            return torch.cat(out, 1), scales, dets

    model = Waves()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    t.apply(model, optimizer)
    for step in range(4):
        model.zero_grad()
        z, scales, dets = model(tokens(step)[0])
        for i, log_s in enumerate(scales):
            total = torch.sum(log_s) if i == 0 else total + torch.sum(log_s)  # noqa: F821
            det = dets[i] if i == 0 else det + dets[i]  # noqa: F821
        loss = (torch.sum(z * z) / (2 * 1.0) - total - det) / (z.size(0) * z.size(1) * z.size(2))
        loss.backward()
        optimizer.step()
        if step == 1:
            for_use = Waves()
            for_use.load_state_dict(model.state_dict())
            for block in for_use.blocks:
                nn.utils.remove_weight_norm(block.start)
                nn.utils.remove_weight_norm(block.layer)
            with torch.no_grad():
                t.note("used", for_use(tokens(9)[0])[0])
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "outputs and their steps are penalised, states kept, and an average begins where an evaluation no longer falls (AWD-LSTM)",
    only=EXACT,
)
def average_that_begins(t: Trial) -> None:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(WIDTH, WIDTH)
            self.rnns = nn.ModuleList([nn.LSTM(WIDTH, WIDTH) for _ in range(2)])
            self.blocks = nn.Sequential(Block())
            self.head = nn.Linear(WIDTH, NUM_CLASSES)

        def locked(self, x: torch.Tensor, rate: float) -> torch.Tensor:
            if not self.training:
                return x
            mask = x.data.new(1, x.size(1), x.size(2)).bernoulli_(1 - rate) / (1 - rate)
            return mask.expand_as(x) * x

        def forward(self, x: torch.Tensor, hidden: Any) -> tuple[torch.Tensor, ...]:
            raw, new = self.locked(self.stem(x), 0.2), []
            for rnn, h in zip(self.rnns, hidden, strict=True):
                raw, after = rnn(raw, h)
                new.append(after)
            dropped = self.locked(self.blocks(raw), 0.2)
            return self.head(dropped), new, raw, dropped

    def repackaged(h: Any) -> Any:
        return h.detach() if isinstance(h, torch.Tensor) else tuple(repackaged(each) for each in h)

    model = Language()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=1e-6)
    later = torch.optim.ASGD(model.parameters(), lr=0.5, t0=0, lambd=0.0, weight_decay=1e-6)
    t.apply(model, optimizer, later)
    hidden: Any = [(torch.zeros(1, 4, WIDTH), torch.zeros(1, 4, WIDTH)) for _ in range(2)]
    seen: list[float] = []
    for step in range(6):
        x, y = tokens(step)
        length = 3 + step % 3
        rate = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = rate * length / 5
        hidden = repackaged(hidden)
        optimizer.zero_grad()
        out, hidden, raw, dropped = model(x[:, :length].transpose(0, 1), hidden)
        loss = functional.cross_entropy(out.flatten(0, 1), y[:, :length].T.flatten())
        loss = loss + 0.2 * dropped.pow(2).mean() + 0.1 * (raw[1:] - raw[:-1]).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        optimizer.param_groups[0]["lr"] = rate
        model.eval()
        swapped = {}
        if optimizer is later:
            for p in model.parameters():
                swapped[p] = p.data.clone()
                p.data = later.state[p]["ax"].clone()
        with torch.no_grad():
            judged = float(
                functional.cross_entropy(
                    model(tokens(50)[0].transpose(0, 1), repackaged(hidden))[0].flatten(0, 1), tokens(50)[1].T.flatten()
                )
            )
        for p, data in swapped.items():
            p.data = data.clone()
        model.train()
        if optimizer is not later and len(seen) > 1 and judged > min(seen[:-1]) - 0.02:
            optimizer = later
        seen.append(judged)
        t.note("judged", judged)
        t.end_step()


@attack(
    "gradients",
    "critics of periods judge waves folded by their length, features of all layers are matched, two optimizers with schedules (HiFi-GAN)",
    only=EXACT,
)
def folded_waves(t: Trial) -> None:
    class Wave(Images):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.chain(self.stem(x))[:, :3] + x)

    class Period(nn.Module):
        def __init__(self, period: int) -> None:
            super().__init__()
            self.period = period
            self.convs = nn.ModuleList(nn.utils.weight_norm(nn.Conv2d(c, 4, (3, 1), padding=(1, 0))) for c in (1, 4))
            self.post = nn.utils.weight_norm(nn.Conv2d(4, 1, (3, 1), padding=(1, 0)))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
            b, c, n = x.shape
            if n % self.period:
                x = functional.pad(x, (0, self.period - n % self.period), "reflect")
            x, maps = x.view(b, c, -1, self.period), []
            for conv in self.convs:
                x = functional.leaky_relu(conv(x), 0.1)
                maps.append(x)
            x = self.post(x)
            return torch.flatten(x, 1, -1), [*maps, x]

    g = Wave()
    d = nn.ModuleList([Period(2), Period(3)])
    of_g = torch.optim.AdamW(g.parameters(), 1e-2, betas=(0.8, 0.99))
    of_d = torch.optim.AdamW(d.parameters(), 1e-2, betas=(0.8, 0.99))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, gamma=0.9, last_epoch=-1) for o in (of_g, of_d)]
    t.track(d)
    t.apply(g, of_g)

    def flat(x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1)[:, None]

    for step in range(4):
        real = images(step)[0]
        fake = g(real.flip(3))
        of_d.zero_grad()
        loss_d = sum(
            torch.mean((1 - each(flat(real))[0]) ** 2) + torch.mean(each(flat(fake.detach()))[0] ** 2) for each in d
        )
        loss_d.backward()
        of_d.step()
        of_g.zero_grad()
        loss_g = functional.l1_loss(torch.fft.rfft(flat(real)).abs(), torch.fft.rfft(flat(fake)).abs()) * 5
        for each in d:
            (_, maps_r), (out, maps) = each(flat(real)), each(flat(fake))
            loss_g = loss_g + sum(torch.mean(torch.abs(a - b)) for a, b in zip(maps_r, maps, strict=True)) * 2
            loss_g = loss_g + torch.mean((1 - out) ** 2)
        loss_g.backward()
        of_g.step()
        if step % 2:
            for schedule in schedules:
                schedule.step()
        t.note("fake", fake)
        t.end_step()


@attack(
    "parts",
    "alignments of two sequences by a soft minimum, whose forward and backward are loops in numpy (soft dynamic time warping)",
    only=EXACT,
)
def warped_time(t: Trial) -> None:
    class Warped(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, distances: torch.Tensor, gamma: float) -> torch.Tensor:
            d = distances.detach().cpu().numpy()
            b, n, m = d.shape
            r = np.ones((b, n + 2, m + 2)) * np.inf
            r[:, 0, 0] = 0
            for k in range(b):
                for j in range(1, m + 1):
                    for i in range(1, n + 1):
                        ways = np.array([-r[k, i - 1, j - 1], -r[k, i - 1, j], -r[k, i, j - 1]]) / gamma
                        top = ways.max()
                        r[k, i, j] = d[k, i - 1, j - 1] - gamma * (np.log(np.exp(ways - top).sum()) + top)
            ctx.r, ctx.gamma = r, gamma
            ctx.save_for_backward(distances)
            return torch.from_numpy(r[:, -2, -2].copy()).to(distances.dtype)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            (distances,) = ctx.saved_tensors
            b, n, m = distances.shape
            d, r = np.zeros((b, n + 2, m + 2)), ctx.r.copy()
            d[:, 1:-1, 1:-1] = distances.detach().cpu().numpy()
            e = np.zeros((b, n + 2, m + 2))
            e[:, -1, -1], r[:, :, -1], r[:, -1, :] = 1, -np.inf, -np.inf
            r[:, -1, -1] = r[:, -2, -2]
            for k in range(b):
                for j in range(m, 0, -1):
                    for i in range(n, 0, -1):
                        for di, dj in ((1, 0), (0, 1), (1, 1)):
                            a = (r[k, i + di, j + dj] - r[k, i, j] - d[k, i + di, j + dj]) / ctx.gamma
                            e[k, i, j] += e[k, i + di, j + dj] * np.exp(a)
            found = torch.from_numpy(e[:, 1:-1, 1:-1].copy()).to(distances.dtype)
            return gradients[0].view(-1, 1, 1).expand_as(found) * found, None

    class Aligned(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            goals = functional.one_hot(y, NUM_CLASSES).to(x.dtype)
            out = self.head(self.features(x))
            return Warped.apply((out[:, :, None] - goals[:, None]).square().sum(-1), 1.0).mean()

    model = Aligned()
    train(t, model, adamw(model), num_steps=3)
