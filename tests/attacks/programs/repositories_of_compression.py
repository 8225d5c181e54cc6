"""Binary, sparse and adapted nets as their repositories have them: data of inputs and weights exchanged in the forward, masks by straight-through scores, ranks cut by gradients."""

import math
from typing import Any

import torch
from tests.attacks.models import WIDTH, Block, Images, Net, adamw, images, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


class _BinaryLinear(nn.Linear):
    """Signs of inputs and weights are put in by `.data`; the weight's numbers are an attribute of the parameter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.size(-1) != WIDTH:
            x.data = x.data.sign()
        if not hasattr(self.weight, "org"):
            self.weight.org = self.weight.data.clone()
        self.weight.data = self.weight.org.sign()
        return functional.linear(x, self.weight)


@attack(
    "recomputation",
    "signs take the place of inputs' and weights' data in the forward, the numbers wait on the parameter (BinaryNet)",
    only=EXACT,
)
def binary_net(t: Trial) -> None:
    class Binary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.act = nn.BatchNorm1d(WIDTH), nn.Hardtanh(inplace=True)
            self.wide, self.narrow = (
                _BinaryLinear(WIDTH, 2 * WIDTH, bias=False),
                _BinaryLinear(2 * WIDTH, WIDTH, bias=False),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x.transpose(1, 2)).transpose(1, 2)
            return x + 0.1 * self.narrow(self.act(0.1 * self.wide(y)))

    model = Net([Binary(), Binary()])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    t.writes_within_step("wide.weight", "narrow.weight")
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        for p in list(model.parameters()):
            if hasattr(p, "org"):
                p.data.copy_(p.org)
        optimizer.step()
        for p in list(model.parameters()):
            if hasattr(p, "org"):
                p.org.copy_(p.data.clamp_(-1, 1))
        t.note("loss", loss)
        t.note("numbers", [p.org for p in model.parameters() if hasattr(p, "org")])
        t.end_step()


class _MaskedConv(nn.Conv2d):
    def __init__(self, kind: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("mask", self.weight.data.clone())
        _, _, height, width = self.weight.size()
        self.mask.fill_(1)
        self.mask[:, :, height // 2, width // 2 + (kind == "B") :] = 0
        self.mask[:, :, height // 2 + 1 :] = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data *= self.mask
        return super().forward(x)


@attack("parts", "convolutions multiply their weight's data by a mask in each forward (PixelCNN)")
def masked_convolutions(t: Trial) -> None:
    chain = [_MaskedConv("A", 3, 4, 3, padding=1), nn.ReLU(True), _MaskedConv("B", 4, 4, 3, padding=1), nn.Tanh()]
    model = Images(chain)
    t.writes_within_step("weight")
    train(t, model, adamw(model), num_steps=4, batch=images)


@attack("recomputation", "linear layers of blocks multiply their weight's data by a mask in each forward, in place")
def masked_data_in_blocks(t: Trial) -> None:
    class Masked(nn.Linear):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.register_buffer(
                "mask", (torch.arange(self.weight.numel()).view_as(self.weight) % 3 != 0).to(self.weight.dtype)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.data *= self.mask
            return functional.linear(x, self.weight, self.bias)

    class MaskedBlock(Block):
        def __init__(self) -> None:
            super().__init__()
            self.wide = Masked(WIDTH, 2 * WIDTH)

    model = Net([MaskedBlock(), MaskedBlock()])
    t.writes_within_step("wide.weight")
    train(t, model, adamw(model), num_steps=4)


class _Top(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, share: float) -> torch.Tensor:
        out = scores.clone()
        _, order = scores.flatten().sort(descending=True)
        count = int(share * scores.numel())
        flat = out.flatten()
        flat[order[count:]] = 0
        flat[order[:count]] = 1
        return flat.view_as(scores)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


@attack(
    "recomputation",
    "scores of weights learn through a mask of the largest, whose share falls by a cubic schedule that the loop hands in (movement pruning)",
    only=EXACT,
)
def movement_pruning(t: Trial) -> None:
    class Pruned(nn.Linear):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.scores = nn.Parameter(torch.randn(self.weight.size()) * 0.01)

        def forward(self, x: torch.Tensor, threshold: float) -> torch.Tensor:  # type: ignore[override]
            return functional.linear(x, _Top.apply(self.scores, threshold) * self.weight, self.bias)

    class PrunedBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.wide, self.narrow = nn.LayerNorm(WIDTH), Pruned(WIDTH, 2 * WIDTH), Pruned(2 * WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, threshold: float) -> torch.Tensor:
            return x + self.narrow(functional.gelu(self.wide(self.norm(x), threshold)), threshold)

    class Movement(Net):
        def __init__(self) -> None:
            super().__init__([PrunedBlock(), PrunedBlock()], sequential=False)

        def forward(self, x: torch.Tensor, y: torch.Tensor, threshold: float) -> torch.Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = block(x, threshold=threshold)
            return self.loss(self.head(x), y)

    model = Movement()
    scores = [p for n, p in model.named_parameters() if "scores" in n]
    others = [p for n, p in model.named_parameters() if "scores" not in n]
    optimizer = torch.optim.AdamW([{"params": scores, "lr": 1e-1}, {"params": others, "lr": 1e-2}])
    t.apply(model, optimizer)
    for step in range(5):
        x, y = tokens(step)
        threshold = 1.0 if step == 0 else 0.5 + 0.5 * (1 - step / 5) ** 3
        penalty = sum(torch.norm(torch.sigmoid(s), p=1) / s.numel() for s in scores)
        loss = model(x, y, threshold) + threshold * 0.1 * penalty / len(scores)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "weights stay as drawn and scores choose a subnet of them, only scores are in the optimizer (supermasks)",
    only=EXACT,
)
def supermasks(t: Trial) -> None:
    class Subnet(nn.Linear):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, bias=False)
            self.popup = nn.Parameter(torch.empty(self.weight.shape))
            nn.init.kaiming_uniform_(self.popup, a=math.sqrt(5))
            self.weight.requires_grad = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.linear(x, self.weight * _Top.apply(self.popup.abs(), 0.5))

    class Chosen(Block):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = Subnet(WIDTH, 2 * WIDTH), Subnet(2 * WIDTH, WIDTH)

    model = Net([Chosen(), Chosen()])
    train(t, model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.2, 0.9), num_steps=4)


@attack(
    "recomputation",
    "gates of weights by a stretched uniform noise, drawn in the forward; their parameters are clamped after each step (L0)",
    only=EXACT,
)
def hard_concrete_gates(t: Trial) -> None:
    class Gated(nn.Module):
        def __init__(self, width: int, out: int) -> None:
            super().__init__()
            self.weights, self.bias = nn.Parameter(torch.randn(width, out) * 0.3), nn.Parameter(torch.zeros(out))
            self.qz_loga = nn.Parameter(torch.randn(width) * 1e-2)

        def constrain(self) -> None:
            self.qz_loga.data.clamp_(min=math.log(1e-2), max=math.log(1e2))

        def penalty(self) -> torch.Tensor:
            return torch.sigmoid(self.qz_loga - 2 / 3 * math.log(0.1 / 1.1)).clamp(min=1e-6).sum()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                eps = self.weights.data.new(self.qz_loga.shape).uniform_(1e-6, 1 - 1e-6)
                y = torch.sigmoid((torch.log(eps) - torch.log(1 - eps) + self.qz_loga) / (2 / 3))
            else:
                y = torch.sigmoid(self.qz_loga)
            z = functional.hardtanh(y * 1.2 - 0.1, min_val=0, max_val=1)
            return x.matmul(z.view(-1, 1) * self.weights).add(self.bias)

    class Sparse(Block):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = Gated(WIDTH, 2 * WIDTH), Gated(2 * WIDTH, WIDTH)

    model = Net([Sparse(), Sparse()])
    optimizer = adamw(model)
    beta = {k: v.detach().clone() for k, v in model.named_parameters()}
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step)) + 0.01 * sum(m.penalty() for m in model.modules() if isinstance(m, Gated))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for module in model.modules():
            if isinstance(module, Gated):
                module.constrain()
        for name, p in model.named_parameters():
            beta[name].mul_(0.9).add_(0.1 * p.data)
        if step % 2:
            old = [p.data.clone() for p in model.parameters()]
            for name, p in model.named_parameters():
                p.data.copy_(beta[name] / (1 - 0.9 ** (step + 1)))
            model.eval()
            with torch.no_grad():
                t.note("judged", model(*tokens(50)))
            model.train()
            for p, value in zip(model.parameters(), old, strict=True):
                p.data.copy_(value)
        t.end_step()


@attack(
    "recomputation",
    "weights are mixed out with those of before by a drawn mask, scaled so that the mean stays (mixout)",
)
def mixout(t: Trial) -> None:
    class Mixed(nn.Linear):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.target = self.weight.detach().clone() + 0.01

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.training:
                return super().forward(x)
            noise = self.weight.new().resize_as_(self.weight).bernoulli_(1 - 0.3)
            weight = (torch.addcmul((1 - noise) * self.target, noise, self.weight) - 0.3 * self.target) / 0.7
            return functional.linear(x, weight, self.bias)

    class MixedBlock(Block):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = Mixed(WIDTH, 2 * WIDTH), Mixed(2 * WIDTH, WIDTH)

    train(t, Net([MixedBlock(), MixedBlock()]), num_steps=4)


@attack(
    "recomputation",
    "a hook on the embedding adds noise scaled by length in training, and is put off for evaluation (NEFTune)",
)
def noisy_embeddings(t: Trial) -> None:
    model = Net()

    def hook(module: nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor:
        if module.training:
            dims = torch.tensor(output.size(1) * output.size(2))
            magnitude = module.alpha / torch.sqrt(dims)
            output = output + torch.zeros_like(output).uniform_(-float(magnitude), float(magnitude))
        return output

    model.stem.alpha = 5.0
    handle = model.stem.register_forward_hook(hook)
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(5):
        if step == 3:
            handle.remove()
            del model.stem.alpha
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "ranks of adapters are cut by what weights and gradients show after the step, averaged, with an orthogonal penalty (AdaLoRA)",
    only=EXACT,
)
def adaptive_ranks(t: Trial) -> None:
    class Adapted(nn.Linear):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.weight.requires_grad_(False)
            self.bias.requires_grad_(False)
            self.lora_a = nn.Parameter(torch.randn(3, self.in_features) * 0.3)
            self.lora_e = nn.Parameter(torch.full((3, 1), 0.1))
            self.lora_b = nn.Parameter(torch.randn(self.out_features, 3) * 0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + x @ (self.lora_a * self.lora_e).T @ self.lora_b.T / 3

    class AdaptedBlock(Block):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = Adapted(WIDTH, 2 * WIDTH), Adapted(2 * WIDTH, WIDTH)

    model = Net([AdaptedBlock(), AdaptedBlock()])
    optimizer = adamw(model)
    t.apply(model, optimizer)
    importance: dict[str, torch.Tensor] = {}
    uncertainty: dict[str, torch.Tensor] = {}
    for step in range(5):
        loss, penalty, count = model(*tokens(step)), torch.zeros(()), 0
        for name, p in model.named_parameters():
            if "lora_a" in name or "lora_b" in name:
                cov = p @ p.T if "lora_a" in name else p.T @ p
                eye = torch.empty_like(cov)
                torch.nn.init.eye_(eye)
                eye.requires_grad = False
                count += 1
                penalty = penalty + torch.norm(cov - eye, p="fro")
        loss = loss + 0.1 * penalty / count
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_" not in name:
                    continue
                if name not in importance:
                    importance[name], uncertainty[name] = torch.zeros_like(p), torch.zeros_like(p)
                now = (p * p.grad).abs().detach()
                importance[name] = 0.85 * importance[name] + 0.15 * now
                uncertainty[name] = 0.85 * uncertainty[name] + 0.15 * (now - importance[name]).abs()
            if step % 2:
                scores = {n: importance[n] * uncertainty[n] for n in importance if "lora_e" in n}
                threshold = torch.kthvalue(torch.cat([s.view(-1) for s in scores.values()]), 4)[0].item()
                for name, p in model.named_parameters():
                    if "lora_e" in name:
                        p.masked_fill_(scores[name] <= threshold, 0.0)
        optimizer.zero_grad()
        t.note("importance", list(importance.values())[:3])
        t.end_step()


@attack(
    "gradients",
    "frozen random projections are shared by all layers through a dict of buffers on the model, small vectors are trained (VeRA)",
    only=EXACT,
)
def shared_projections(t: Trial) -> None:
    class Vectors(nn.Linear):
        def __init__(self, shared: dict[str, torch.Tensor], *args: Any) -> None:
            super().__init__(*args)
            self.shared = shared
            self.weight.requires_grad_(False)
            self.lambda_b = nn.Parameter(torch.zeros(self.out_features))
            self.lambda_d = nn.Parameter(torch.full((4,), 0.1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = self.shared["a"][:, : self.in_features], self.shared["b"][: self.out_features]
            x_dropped = functional.dropout(x, 0.1, self.training)
            return super().forward(x) + self.lambda_b * functional.linear(
                self.lambda_d * functional.linear(x_dropped, a), b
            )

    class Vectored(Block):
        def __init__(self, shared: dict[str, torch.Tensor]) -> None:
            super().__init__()
            self.wide, self.narrow = Vectors(shared, WIDTH, 2 * WIDTH), Vectors(shared, 2 * WIDTH, WIDTH)

    shared = {"a": torch.randn(4, 2 * WIDTH) * 0.3, "b": torch.randn(2 * WIDTH, 4) * 0.3}
    model = Net([Vectored(shared), Vectored(shared)])
    model.register_buffer("vera_a", shared["a"])
    model.register_buffer("vera_b", shared["b"])
    train(t, model, adamw(model), num_steps=4)


@attack(
    "gradients",
    "weights turn by a Cayley transform in blocks on their diagonal, in front of frozen ones, with dropped blocks (OFT)",
    only=EXACT,
)
def turned_weights(t: Trial) -> None:
    class Turned(nn.Linear):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.weight.requires_grad_(False)
            self.turn = nn.Parameter(torch.randn(self.in_features // 4, 4, 4) * 0.01)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            skew = 0.5 * (self.turn - self.turn.transpose(1, 2))
            eye = torch.eye(4).unsqueeze(0).expand(len(skew), 4, 4)
            turns = torch.linalg.solve(eye + skew, eye - skew, left=False)
            if self.training:
                kept = torch.ones(len(turns)).index_fill_(0, torch.randperm(len(turns))[:1], 0.0).view(-1, 1, 1)
                turns = kept * turns + (1 - kept) * eye
            block = torch.block_diag(*[turns[i, ...] for i in range(len(turns))])
            return functional.linear(x, torch.mm(block, self.weight.T).T, self.bias)

    class TurnedBlock(Block):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = Turned(WIDTH, 2 * WIDTH), Turned(2 * WIDTH, WIDTH)

    model = Net([TurnedBlock(), TurnedBlock()])
    train(t, model, adamw(model), num_steps=4)


@attack(
    "gradients",
    "a mask of owners keeps earlier tasks' weights: their gradients are zeroed, pruned ones come back for the next (PackNet)",
    only=EXACT,
)
def packed_tasks(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    owners = {n: torch.ones_like(p, dtype=torch.uint8) for n, p in model.named_parameters() if p.ndim > 1}
    for task in (1, 2):
        for step in range(3):
            loss = model(*tokens(10 * task + step))
            optimizer.zero_grad()
            loss.backward()
            for name, p in model.named_parameters():
                if name in owners:
                    p.grad.data[owners[name].ne(task)] = 0
                elif task > 1:
                    p.grad.data.fill_(0)
            optimizer.step()
            for name, p in model.named_parameters():
                if name in owners:
                    p.data[owners[name].eq(0)] = 0.0
            t.note("loss", loss)
            t.end_step()
        for name, p in model.named_parameters():
            if name in owners:
                mine = p.data[owners[name].eq(task)]
                cut = mine.abs().view(-1).kthvalue(round(0.5 * mine.numel()))[0].item()
                gone = p.data.abs().le(cut) & owners[name].eq(task)
                p.data[gone] = 0.0
                owners[name][gone] = task + 1
        t.end_step()


@attack(
    "recomputation",
    "activations and weights are rounded straight through, a trained clip of activations gets its gradient by hand (DoReFa, PACT)",
    only=EXACT,
)
def rounded_straight_through(t: Trial) -> None:
    class Clipped(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, alpha)
            return torch.clamp(x, min=0, max=alpha.item())

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            x, alpha = ctx.saved_tensors
            low, high = x < 0, x > alpha
            inside = (~(low | high)).to(x.dtype)
            return gradients[0] * inside, (gradients[0] * high.to(x.dtype)).sum().view_as(alpha)

    def rounded(x: torch.Tensor, bits: int) -> torch.Tensor:
        n = 2**bits - 1
        return x + (torch.round(x * n) / n - x).detach()

    class Rounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.alpha = nn.LayerNorm(WIDTH), nn.Parameter(torch.tensor([1.0]))
            self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

        def weight(self, layer: nn.Linear) -> torch.Tensor:
            w = torch.tanh(layer.weight)
            w = w / 2 / torch.max(torch.abs(w)) + 0.5
            return 2 * rounded(w, 3) - 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = functional.linear(self.norm(x), self.weight(self.wide), self.wide.bias)
            y = rounded(Clipped.apply(y, self.alpha) / self.alpha.detach(), 3) * self.alpha.detach()
            return x + 0.3 * functional.linear(y, self.weight(self.narrow), self.narrow.bias)

    model = Net([Rounded(), Rounded()])
    train(
        t,
        model,
        torch.optim.SGD(model.parameters(), 1e-2, 0.9),
        num_steps=4,
        between=lambda _: t.note("alpha", model.blocks[0].alpha.grad),
    )


@attack(
    "gradients",
    "a head is trained at several widths of its features by slices of its weight, and their losses added (Matryoshka)",
)
def nested_widths(t: Trial) -> None:
    class Nested(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            features = self.features(x)
            losses = [self.loss(self.head(features), y)]
            for width in (2, 4):
                logits = torch.matmul(features[..., :width], self.head.weight[:, :width].t()) + self.head.bias
                losses.append(self.loss(logits, y))
            return torch.stack(losses).mean()

    train(t, Nested(), num_steps=4)


@attack(
    "recomputation",
    "norms of three values per layer scale keys, values and inner features, all else is frozen (IA3), twice",
    only=EXACT,
)
def scaled_inside(t: Trial) -> None:
    class Scaled(Block):
        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(False)
            self.ia3 = nn.ParameterDict(
                {"inner": nn.Parameter(torch.ones(2 * WIDTH)), "out": nn.Parameter(torch.ones(WIDTH))}
            )
            self.merged = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = functional.gelu(self.wide(self.norm(x)))
            return x + (self.narrow(y) if self.merged else self.narrow(y * self.ia3["inner"]) * self.ia3["out"])

        def turn(self) -> None:
            # Merged for an evaluation, and taken out again.
            factor = self.ia3["out"].data[:, None] * self.ia3["inner"].data[None]
            self.narrow.weight.data = self.narrow.weight.data * (1 / factor if self.merged else factor)
            self.narrow.bias.data = self.narrow.bias.data * (
                1 / self.ia3["out"].data if self.merged else self.ia3["out"].data
            )
            self.merged = not self.merged

    model = Net([Scaled(), Scaled()])
    optimizer = adamw(model)

    def judged(step: int) -> None:
        if step % 2:
            for block in model.blocks:
                block.turn()
            with torch.no_grad():
                t.note("judged", model(*tokens(50)))
            for block in model.blocks:
                block.turn()

    train(t, model, optimizer, num_steps=4, after=judged)
