"""Losses of papers that look at logits, features or classes in ways of their own: penalties through dummy scales, margins, priors, criteria with a memory."""

import math
from typing import Any

import numpy as np
import torch
from tests.attacks.models import NUM_CLASSES, WIDTH, Block, Net, adamw, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


def _flat(logits: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return logits.reshape(-1, NUM_CLASSES), y.reshape(-1)


@attack(
    "second order",
    "invariant risk: the gradient of the loss with respect to a dummy scale of the logits is penalised, by environment (IRM)",
)
def invariant_risk(t: Trial) -> None:
    class Invariant(Net):
        returns_loss = False

    model = Invariant()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(5):
        losses, penalty = [], 0.0
        for environment in range(2):
            x, y = tokens(2 * step + environment)
            logits, y = _flat(model(x), y)
            scale = torch.ones((), requires_grad=True)
            losses.append(functional.cross_entropy(logits * scale, y))
            one = functional.cross_entropy(logits[::2] * scale, y[::2])
            other = functional.cross_entropy(logits[1::2] * scale, y[1::2])
            grads = [torch.autograd.grad(each, scale, create_graph=True)[0] for each in (one, other)]
            penalty = penalty + grads[0] * grads[1]
        loss = torch.stack(losses).mean() + (1.0 if step > 2 else 0.1) * penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "second order",
    "features whose gradient is largest are masked, and the head runs once more on what is left (self-challenging)",
)
def self_challenging(t: Trial) -> None:
    class Challenged(Net):
        returns_loss = False

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            features = self.features(x)
            if self.training:
                held = features.detach().requires_grad_()
                chosen = self.head(held).gather(-1, y.unsqueeze(-1)).sum()
                (slope,) = torch.autograd.grad(chosen, held)
                bound = slope.flatten(1).kthvalue(2 * slope[0].numel() // 3, dim=1).values
                features = features * (slope < bound[:, None, None])
            return self.loss(self.head(features), y)

    train(t, Challenged(), num_steps=5)


@attack(
    "second order",
    "a map of where the answer comes from is made by the gradient of a logit, and is part of the loss (guided attention)",
)
def guided_attention(t: Trial) -> None:
    class Guided(Net):
        returns_loss = False

    model = Guided()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(5):
        x, y = tokens(step)
        features = model.features(x)
        logits = model.head(features)
        (slope,) = torch.autograd.grad(logits.gather(-1, y.unsqueeze(-1)).sum(), features, create_graph=True)
        where = functional.relu((slope * features).sum(-1))
        loss = model.loss(logits, y) + 0.1 * where.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "the variance of the head's gradients over examples is held together between domains, by products of features and errors (Fishr)",
)
def variance_of_gradients(t: Trial) -> None:
    class Fishr(Net):
        returns_loss = False

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            features = self.features(x)
            logits = self.head(features)
            wrong = logits.softmax(-1) - functional.one_hot(y, NUM_CLASSES)
            each = torch.einsum("btc,btw->bcw", wrong, features)
            spread = [part.var(0) for part in each.chunk(2)]
            return self.loss(logits, y) + 0.01 * (spread[0] - spread[1]).square().mean()

    train(t, Fishr(), num_steps=5)


@attack(
    "parts",
    "logits are shifted by the log of class frequencies, which the criterion counts batch by batch (logit adjustment)",
)
def adjusted_by_prior(t: Trial) -> None:
    class Adjusted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("counts", torch.ones(NUM_CLASSES))

        def forward(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            logits, y = _flat(logits, y)
            with torch.no_grad():
                self.counts += torch.bincount(y, minlength=NUM_CLASSES)
            return functional.cross_entropy(logits + (self.counts / self.counts.sum()).log(), y)

    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.criterion = Adjusted()

        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.criterion(logits, y)

    train(t, Model(), num_steps=5)


@attack(
    "parts",
    "margins by class are taken off the target's logit, and class weights come in only later (LDAM with deferred weights)",
)
def margins_then_weights(t: Trial) -> None:
    class Margins(Net):
        step = 0

        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            logits, y = _flat(logits, y)
            margins = 0.5 / torch.arange(1.0, NUM_CLASSES + 1).pow(0.25)
            lower = logits - functional.one_hot(y, NUM_CLASSES) * margins[y].unsqueeze(1)
            weight = torch.arange(1.0, NUM_CLASSES + 1).rsqrt() if self.step > 2 else None
            return functional.cross_entropy(2 * torch.where(lower < logits, lower, logits), y, weight=weight)

    model = Margins()

    def count(step: int) -> None:
        model.step = step

    train(t, model, num_steps=6, before=count)


@attack(
    "parts",
    "a criterion collects gradients of positives and negatives, made by hand in its forward, and weighs classes by them (EQL v2)",
)
def weighed_by_collected_gradients(t: Trial) -> None:
    class Collecting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positive, self.negative = torch.zeros(NUM_CLASSES), torch.zeros(NUM_CLASSES)

        def forward(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            logits, y = _flat(logits, y)
            target = functional.one_hot(y, NUM_CLASSES).to(logits)
            share = 1 / (1 + torch.exp(-3 * (self.positive / (self.negative + 1e-9) - 0.8)))
            weight = (1 + 4 * (1 - share)) * target + share * (1 - target)
            loss = functional.binary_cross_entropy_with_logits(logits, target, reduction="none")
            slope = (torch.sigmoid(logits.detach()) - target).abs()
            self.positive += (slope * target * weight).sum(0)
            self.negative += (slope * (1 - target) * weight).sum(0)
            return (loss * weight.detach()).sum() / len(y)

    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.criterion = Collecting()

        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.criterion(logits, y)

    train(t, Model(), num_steps=5)


@attack(
    "parts",
    "a transition matrix of noisy labels is learned with the model, its determinant penalised (volume minimisation)",
    only=EXACT,
)
def noisy_label_matrix(t: Trial) -> None:
    class Noisy(Net):
        def __init__(self) -> None:
            super().__init__()
            self.transition = nn.Parameter(torch.eye(NUM_CLASSES) * 3)

        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            logits, y = _flat(logits, y)
            matrix = self.transition.softmax(1)
            seen = logits.softmax(-1) @ matrix
            return functional.nll_loss(seen.log(), y) + 0.01 * matrix.slogdet().logabsdet

    train(t, Noisy(), num_steps=5)


@attack(
    "parts",
    "examples are cut and pasted inside of the forward, box and share drawn by numpy, both targets weighed (CutMix)",
)
def cut_and_paste(t: Trial) -> None:
    class Mixed(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            if y is None:
                return super().forward(x)
            share = np.random.beta(1, 1)
            length = int(x.shape[1] * (1 - share))
            begin = np.random.randint(0, x.shape[1] - length + 1)
            other = torch.roll(torch.arange(len(x)), 1)
            mixed = x.clone()
            mixed[:, begin : begin + length] = x[other, begin : begin + length]
            share = 1 - length / x.shape[1]
            logits = super().forward(mixed)
            return share * self.loss(logits, y) + (1 - share) * self.loss(logits, y[other])

    train(t, Mixed(), num_steps=5)


@attack(
    "gradients",
    "the loss runs backwards to a detached copy of the logits, and its gradient goes on from there by hand (memory of logits)",
)
def logits_in_two_passes(t: Trial) -> None:
    class Two(Net):
        returns_loss = False

    model = Two()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(5):
        x, y = tokens(step)
        logits = model(x)
        held = logits.detach().requires_grad_()
        total = 0.0
        for part, target in zip(held.split(2), y.split(2), strict=True):
            loss = (
                functional.cross_entropy(part.reshape(-1, NUM_CLASSES), target.reshape(-1), reduction="sum") / y.numel()
            )
            loss.backward()
            total += loss.item()
        optimizer.zero_grad()
        logits.backward(held.grad)
        optimizer.step()
        t.note("loss", total)
        t.end_step()


@attack(
    "gradients",
    "features are cut, the head and its loss run in a loop over parts with gradients summed in the cut's, then the body goes backwards (LinkedIn's way by hand)",
)
def head_in_parts_by_hand(t: Trial) -> None:
    class Parts(Net):
        returns_loss = False

    model = Parts()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(5):
        x, y = tokens(step)
        features = model.features(x)
        cut = features.detach().requires_grad_()
        optimizer.zero_grad()
        for begin in range(0, x.shape[1], 2):
            logits = model.head(cut[:, begin : begin + 2])
            part = functional.cross_entropy(logits.flatten(0, 1), y[:, begin : begin + 2].flatten(), reduction="sum")
            (part / y.numel()).backward()
        features.backward(cut.grad)
        optimizer.step()
        t.note("cut", cut.grad)
        t.end_step()


class _Entropy(torch.autograd.Function):
    """Linear layer and cross-entropy in one, whose gradients are made in the forward (Liger)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = x @ weight.t() + bias
        log = logits.log_softmax(-1)
        error = (log.exp() - functional.one_hot(y, NUM_CLASSES)) / len(y)
        ctx.save_for_backward(error @ weight, error.t() @ x, error.sum(0))
        return functional.nll_loss(log, y)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        of_x, of_weight, of_bias = ctx.saved_tensors
        # As it is done there: the saved gradients are scaled in place.
        if grad != 1:
            of_x, of_weight, of_bias = of_x.mul_(grad), of_weight.mul_(grad), of_bias.mul_(grad)
        return of_x, of_weight, of_bias, None


@attack(
    "gradients",
    "a fused head and loss make their gradients in the forward, and scale them in place in the backward pass (Liger)",
    only=EXACT,
)
def fused_head_and_loss(t: Trial) -> None:
    class Fused(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            features = self.features(x).flatten(0, 1)
            return _Entropy.apply(features, self.head.weight, self.head.bias, y.flatten())

    model = Fused()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(5):
        optimizer.zero_grad()
        for part in range(2):
            loss = model(*tokens(2 * step + part)) * 0.5
            loss.backward()
            t.note("loss", loss)
        optimizer.step()
        t.end_step()


@attack(
    "parts", "unlikelihood: probabilities of tokens seen before in the sequence are pushed down, with their own mask"
)
def unlikelihood(t: Trial) -> None:
    class Unlikely(Net):
        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            log = logits.log_softmax(-1)
            seen = torch.zeros_like(log)
            for place in range(1, y.shape[1]):
                seen[:, place] = seen[:, place - 1].scatter(1, y[:, place - 1 : place], 1)
            seen = seen.scatter(2, y.unsqueeze(-1), 0)
            against = -(torch.clamp(1 - log.exp(), min=1e-5).log() * seen).sum(-1).mean()
            return functional.nll_loss(*_flat(log, y)) + 0.2 * against

    train(t, Unlikely(), num_steps=5)


@attack(
    "parts",
    "confidence penalty and an entropy bonus through torch.distributions, with a temperature that the optimizer trains",
)
def entropy_bonus(t: Trial) -> None:
    class Bonus(Net):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(1.0))

        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            chosen = torch.distributions.Categorical(logits=logits / self.temperature.clamp(0.5, 2))
            return -chosen.log_prob(y).mean() - 0.01 * chosen.entropy().mean()

    train(t, Bonus(), num_steps=5)


@attack(
    "parts",
    "the expected embedding of the answer goes through the model once more (soft self-feeding), and both losses are summed",
)
def answer_fed_back(t: Trial) -> None:
    class Fed(Net):
        returns_loss = False

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(NUM_CLASSES, WIDTH)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            logits = self.head(self.features(x))
            again = functional.softmax(logits / 0.7, dim=-1) @ self.embedding.weight
            return self.loss(logits, y) + 0.5 * self.loss(self.head(self.features(again)), y)

    train(t, Fed(), num_steps=5)


@attack("parts", "straight-through samples of the answer (gumbel_softmax, hard) go through the first block once more")
def hard_answer_fed_back(t: Trial) -> None:
    class Fed(Net):
        returns_loss = False

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(NUM_CLASSES, WIDTH)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            logits = self.head(self.features(x))
            picked = functional.gumbel_softmax(logits, hard=True) @ self.embedding.weight
            return self.loss(self.head(self.blocks[0](picked)), y) + self.loss(logits, y)

    train(t, Fed(), num_steps=5)


@attack(
    "parts",
    "a conditional random field: the loss is a log-sum-exp over paths, by a loop over tokens, less the score of the right one",
)
def random_field(t: Trial) -> None:
    class Field(Net):
        def __init__(self) -> None:
            super().__init__()
            self.moves = nn.Parameter(torch.zeros(NUM_CLASSES, NUM_CLASSES))

        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            alpha = logits[:, 0]
            right = logits.gather(-1, y.unsqueeze(-1)).sum((1, 2)) + self.moves[y[:, :-1], y[:, 1:]].sum(1)
            for place in range(1, logits.shape[1]):
                alpha = torch.logsumexp(alpha.unsqueeze(2) + self.moves, dim=1) + logits[:, place]
            return (alpha.logsumexp(-1) - right).mean()

    train(t, Field(), num_steps=5)


@attack(
    "parts",
    "noise-contrastive: a few drawn classes and the target, scored by rows of the head's weight without the head",
)
def sampled_classes(t: Trial) -> None:
    class Sampled(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            features = self.features(x)
            if y is None:
                return self.head(features)
            drawn = torch.randint(0, NUM_CLASSES, (3,))
            rows = torch.cat([y.unsqueeze(-1), drawn.expand(*y.shape, 3)], -1)
            scores = (self.head.weight[rows] * features.unsqueeze(2)).sum(-1) + self.head.bias[rows]
            return functional.cross_entropy(scores.flatten(0, 1), torch.zeros(y.numel(), dtype=torch.long))

    train(t, Sampled(), num_steps=5)


@attack("parts", "the old arguments of losses: size_average and reduce, and a sum divided by hand")
def old_arguments(t: Trial) -> None:
    class Old(Net):
        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            logits, y = _flat(logits, y)
            return functional.cross_entropy(input=logits, target=y, size_average=False) / y.numel()  # type: ignore[arg-type]

    train(t, Old(), num_steps=4)


@attack("parts", "logits are moved about before their loss: flipped, stacked, unbound, permuted and put together again")
def logits_moved_about(t: Trial) -> None:
    class Moved(Net):
        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            pieces = torch.stack([piece.flip(0) for piece in logits.unbind(1)], 2).permute(0, 2, 1)
            return functional.cross_entropy(pieces.reshape(-1, NUM_CLASSES), y.flip(0).reshape(-1))

    train(t, Moved(), num_steps=4)


@attack(
    "parts",
    "metrics of all sorts are returned beside the loss: counts, maxima, spreads, strings, the batch's size",
    only=EXACT,
)
def metrics_beside_the_loss(t: Trial) -> None:
    class Metrics(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
            logits = self.head(self.features(x))
            if y is None:
                return logits
            right = logits.argmax(-1) == y
            return {
                "loss": self.loss(logits, y),
                "right": right.sum(),
                "accuracy": right.to(x).mean(),
                "largest": logits.detach().amax(),
                "spread": logits.detach().std(),
                "by class": torch.bincount(logits.argmax(-1).flatten(), minlength=NUM_CLASSES),
                "n": x.shape[0],
                "name": f"batch of {len(x)}",
            }

    model = Metrics()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        found = model(*tokens(step))
        optimizer.zero_grad()
        found["loss"].backward()
        optimizer.step()
        for name, value in found.items():
            t.note(name, value)
        t.end_step()


@attack(
    "parts",
    "the loss of a mixture density: means, spreads and shares from one head, a log-sum-exp over the mixture",
    only=EXACT,
)
def mixture_density(t: Trial) -> None:
    class Density(Net):
        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            mean, spread, share = logits[..., :2], functional.softplus(logits[..., 2:4]) + 0.1, logits[..., 4:6]
            away = (y.unsqueeze(-1) / NUM_CLASSES - mean) / spread
            each = share.log_softmax(-1) - 0.5 * away.square() - spread.log() - 0.5 * math.log(2 * math.pi)
            return -each.logsumexp(-1).mean()

    train(t, Density(), num_steps=5)


@attack(
    "parts",
    "the stem's features are standardised by what the model saw of the batch, and the answer is put back to scale after the head (RevIN)",
)
def reversible_standardisation(t: Trial) -> None:
    class Standardised(nn.Module):
        def forward(self, x: torch.Tensor, mode: str) -> torch.Tensor:
            if mode == "norm":
                self.mean = x.mean(1, keepdim=True).detach()
                self.spread = x.std(1, keepdim=True).detach() + 0.1
                return (x - self.mean) / self.spread
            return x * self.spread.mean(-1, keepdim=True) + self.mean.mean(-1, keepdim=True)

    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.standard = Standardised()

        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            logits = self.standard(self.head(self.features(self.standard(x, "norm"))), "denorm")
            return logits if y is None else self.loss(logits, y)

    train(t, Model(), num_steps=5)


@attack(
    "parts",
    "a block that scores its own rows against a running maximum kept on the criterion's class (a clipped importance weight)",
)
def importance_clipped_by_class(t: Trial) -> None:
    class Weights:
        largest = 1.0

        @classmethod
        def clip(cls, ratio: torch.Tensor) -> torch.Tensor:
            cls.largest = 0.9 * cls.largest + 0.1 * float(ratio.detach().max())
            return ratio.clamp(max=cls.largest)

    class Model(Net):
        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            logits, y = _flat(logits, y)
            each = functional.cross_entropy(logits, y, reduction="none")
            return (Weights.clip(torch.exp(-each.detach())) * each).mean()

    model = Model([Block(), Block()])
    train(t, model, num_steps=5, after=lambda _: t.note("largest", Weights.largest))
