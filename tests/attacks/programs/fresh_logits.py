"""What programs do with logits and losses before, between and after: forms of the loss, and readers of what the head gave."""

import copy
import dataclasses
import io
from typing import Any, NamedTuple

import torch
from tests.attacks.models import NUM_CLASSES, WIDTH, Block, Net, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


def _with_loss(t: Trial, loss: Any, batch: Any = tokens) -> None:
    """Trains a model whose loss is `loss(model, logits, y)`."""

    class Model(Net):
        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return loss(self, logits, y)

    train(t, Model(), batch=batch)


def _flat(logits: torch.Tensor, y: torch.Tensor, **settings: Any) -> torch.Tensor:
    return functional.cross_entropy(logits.reshape(-1, NUM_CLASSES), y.reshape(-1), **settings)


@attack("parts", "perplexity as the loss: exp of the cross-entropy")
def perplexity(t: Trial) -> None:
    _with_loss(t, lambda _, logits, y: _flat(logits, y).exp())


@attack("parts", "every target of every second batch is ignored: the mean is nan, and the step is skipped")
def all_targets_ignored(t: Trial) -> None:
    def batch(step: int) -> Any:
        x, y = tokens(step)
        return x, torch.full_like(y, -100) if step % 2 else y

    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*batch(step))
        t.note("loss", loss)
        if torch.isfinite(loss):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        t.end_step()


@attack("parts", "all targets of half of the batch are ignored, and nan_to_num hides an empty mean")
def half_ignored_and_hidden(t: Trial) -> None:
    def batch(step: int) -> Any:
        x, y = tokens(step)
        y[: len(y) // 2] = -100
        return x, y

    _with_loss(t, lambda _, logits, y: _flat(logits, y).nan_to_num(), batch)


@attack("parts", "the sum of the cross-entropy over the count of targets, clamped to at least one")
def sum_over_clamped_count(t: Trial) -> None:
    def batch(step: int) -> Any:
        x, y = tokens(step)
        y[0, step:] = -100
        return x, y

    _with_loss(t, lambda _, logits, y: _flat(logits, y, reduction="sum") / (y != -100).sum().clamp(min=1), batch)


@attack("parts", "targets are probabilities (distillation), with label smoothing and class weights")
def soft_targets(t: Trial) -> None:
    def batch(step: int) -> Any:
        x, y = tokens(step)
        return x, functional.one_hot(y, NUM_CLASSES).to(x) * 0.9 + 0.1 / NUM_CLASSES

    def loss(_: Any, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weight = torch.linspace(0.5, 2.0, NUM_CLASSES)
        flat = logits.reshape(-1, NUM_CLASSES), y.reshape(-1, NUM_CLASSES)
        return functional.cross_entropy(*flat, weight=weight, label_smoothing=0.1)

    _with_loss(t, loss, batch)


@attack("parts", "classes in the second dimension (logits.transpose(1, 2)), targets two-dimensional")
def classes_second(t: Trial) -> None:
    _with_loss(t, lambda _, logits, y: functional.cross_entropy(logits.transpose(1, 2), y))


@attack("parts", "negative log-likelihood by log_softmax and gather, of the shifted tokens")
def shifted_by_gather(t: Trial) -> None:
    def loss(_: Any, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = logits[:, :-1].log_softmax(-1)
        return -scores.gather(-1, y[:, 1:].unsqueeze(-1)).mean()

    _with_loss(t, loss)


@attack("parts", "cross-entropy without reduction, cut off at its median")
def cut_at_median(t: Trial) -> None:
    def loss(_: Any, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        each = _flat(logits, y, reduction="none")
        return torch.minimum(each, each.detach().median()).mean()

    _with_loss(t, loss)


@attack("parts", "a log-sum-exp over the losses of all examples (group-robust training)")
def soft_maximum_of_losses(t: Trial) -> None:
    def loss(_: Any, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        each = _flat(logits, y, reduction="none").reshape(y.shape).mean(1)
        return torch.logsumexp(each * 3, 0) / 3

    _with_loss(t, loss)


@attack("parts", "soft dice over all tokens of the batch: a quotient of sums")
def soft_dice(t: Trial) -> None:
    def loss(_: Any, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        p, one_hot = logits.softmax(-1), functional.one_hot(y, NUM_CLASSES)
        return 1 - 2 * (p * one_hot).sum() / (p.sum() + one_hot.sum())

    _with_loss(t, loss)


@attack("parts", "a root of the mean squared error")
def root_mean_square(t: Trial) -> None:
    _with_loss(
        t, lambda _, logits, y: functional.mse_loss(logits, functional.one_hot(y, NUM_CLASSES).to(logits)).sqrt()
    )


@attack("parts", "Huber, Gaussian, Poisson and binary losses, each a mean, added up")
def means_added_up(t: Trial) -> None:
    def loss(_: Any, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        goal = functional.one_hot(y, NUM_CLASSES).to(logits)
        variance = functional.softplus(logits) + 0.1
        return (
            functional.huber_loss(logits, goal)
            + functional.gaussian_nll_loss(logits, goal, variance)
            + functional.poisson_nll_loss(logits, goal)
            + functional.binary_cross_entropy_with_logits(logits, goal, pos_weight=torch.full((NUM_CLASSES,), 2.0))
        )

    _with_loss(t, loss)


@attack("parts", "CTC over the tokens, each sequence divided by the length of its targets")
def ctc(t: Trial) -> None:
    def loss(_: Any, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        targets = y[:, :2].clamp(min=1)
        lengths = torch.full((len(y),), logits.shape[1]), torch.tensor([1 + i % 2 for i in range(len(y))])
        return functional.ctc_loss(logits.log_softmax(-1).transpose(0, 1), targets, *lengths)

    _with_loss(t, loss)


@attack("parts", "kl_div with batchmean, over the flattened tokens")
def batchmean(t: Trial) -> None:
    def loss(_: Any, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        goal = functional.one_hot(y, NUM_CLASSES).to(logits) * 0.8 + 0.2 / NUM_CLASSES
        return functional.kl_div(logits.log_softmax(-1), goal, reduction="batchmean")

    _with_loss(t, loss)


@attack("parts", "the mean over tokens of each example and then the sum over examples, divided by len(x)")
def divided_by_len(t: Trial) -> None:
    _with_loss(t, lambda _, logits, y: _flat(logits, y, reduction="none").view(y.shape).mean(1).sum() / len(y))


@attack("parts", "accuracy is kept on the model as a running mean over batches, and weighs the loss")
def accuracy_weighs(t: Trial) -> None:
    class Model(Net):
        accuracy = 0.5

        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            hit = (logits.detach().argmax(-1) == y).to(logits).mean().item()
            self.accuracy = 0.5 * self.accuracy + 0.5 * hit
            return super().loss(logits, y) * (1 + self.accuracy)

    train(t, Model())


class Output(NamedTuple):
    """What Hugging Face models return, by and large."""

    loss: torch.Tensor
    logits: torch.Tensor


@dataclasses.dataclass
class Answer:
    """The same as a dataclass."""

    loss: torch.Tensor
    logits: torch.Tensor


def _returning(t: Trial, kind: Any, read: Any) -> None:
    """Trains a model that returns `kind(loss, logits)`; `read` is given the answer after the step."""

    class Model(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
            logits = self.head(self.features(x))
            return kind(self.loss(logits, y), logits)

    model = Model()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        answer = model(*tokens(step))
        loss = answer["loss"] if isinstance(answer, dict) else answer.loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        read(answer)
        t.end_step()


@attack("parts", "a named tuple of loss and logits; predictions are counted after the step", only=EXACT)
def returns_named_tuple(t: Trial) -> None:
    _returning(t, Output, lambda answer: t.note("predicted", answer.logits.argmax(-1)))


@attack(
    "parts",
    "a dataclass of loss and logits; the logits are pickled, printed, iterated and asked what they are",
    only=EXACT,
)
def logits_inspected(t: Trial) -> None:
    def read(answer: Answer) -> None:
        logits = answer.logits
        file = io.BytesIO()
        torch.save(logits.detach(), file)
        t.note(
            "is", [isinstance(logits, torch.Tensor), torch.is_tensor(logits), len(logits), logits.ndim, logits.is_leaf]
        )
        t.note("rows", [row.sum().detach() for row in logits])
        t.note("array", logits.detach().numpy().copy())
        t.note("copied", copy.deepcopy(logits.detach()))
        t.note("words", str(logits.detach()[0, 0]))

    _returning(t, Answer, read)


@attack("parts", "a dict of loss and logits whose logits are kept for the metric of the epoch")
def logits_kept_for_epoch(t: Trial) -> None:
    kept: list[torch.Tensor] = []
    _returning(t, lambda loss, logits: {"loss": loss, "logits": logits}, lambda answer: kept.append(answer["logits"]))
    t.note("epoch", torch.cat([k.detach() for k in kept]))


@attack("parts", "the type of the logits and their grad_fn decide what the loss is")
def loss_by_type(t: Trial) -> None:
    def loss(_: Any, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scale = 1.0 if type(logits) is torch.Tensor else 2.0
        if logits.grad_fn is None:
            scale += 0.5
        return _flat(logits, y) * scale

    _with_loss(t, loss)


@attack("parts", "the loss is a module that keeps what it was given, and is asked for it later")
def loss_module_keeps(t: Trial) -> None:
    class Kept(nn.CrossEntropyLoss):
        last: Any = None

        def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            self.last = (logits.detach().clone(), target)
            return super().forward(logits, target)

    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.criterion = Kept()

        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.criterion(logits.reshape(-1, NUM_CLASSES), y.reshape(-1))

    model = Model()
    train(t, model, after=lambda _: t.note("last", model.criterion.last[0]))


@attack("parts", "logits capped by tanh, divided by a learned temperature, some masked in place")
def capped_and_masked(t: Trial) -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(1.5))

        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            logits = torch.tanh(logits / 3) * 3 / self.temperature
            logits = logits.masked_fill_(torch.arange(NUM_CLASSES) == NUM_CLASSES - 1, -10.0)
            return super().loss(logits, y.clamp(max=NUM_CLASSES - 2))

    train(t, Model())


@attack("parts", "only the tokens that have a target are given to the head (a boolean index before it)")
def head_of_masked_tokens(t: Trial) -> None:
    class Model(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            x = self.features(x)
            if y is None:
                return self.head(x)
            chosen = y % 2 == 0
            return functional.cross_entropy(self.head(x[chosen]), y[chosen])

    train(t, Model())


@attack("parts", "the gradient of the logits is retained and read after the backward pass")
def retained_logits(t: Trial) -> None:
    seen: list[torch.Tensor] = []

    class Model(Net):
        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            logits.retain_grad()
            seen.append(logits)
            return super().loss(logits, y)

    train(t, Model(), between=lambda _: t.note("gradient", seen.pop().grad))


@attack("parts", "loss.backward(gradient=2), of a loss of shape [1]")
def backward_with_gradient(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step)).reshape(1)
        optimizer.zero_grad()
        loss.backward(gradient=torch.full((1,), 2.0))
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("parts", "the loss is negated and maximised (maximize=True)")
def maximised(t: Trial) -> None:
    class Model(Net):
        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return -super().loss(logits, y)

    model = Model()
    train(t, model, torch.optim.SGD(model.parameters(), lr=0.1, maximize=True))


@attack("parts", "the loss of every batch is divided by the loss of the first batch, which the model keeps")
def relative_loss(t: Trial) -> None:
    class Model(Net):
        first: Any = None

        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = super().loss(logits, y)
            if self.first is None:
                self.first = loss.detach()
            return loss / self.first

    train(t, Model())


@attack("parts", "uncertainty weighting: the loss times exp(-s) plus s, with a learned s")
def learned_loss_weight(t: Trial) -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.s = nn.Parameter(torch.zeros(()))

        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().loss(logits, y) * torch.exp(-self.s) + self.s

    train(t, Model())


@attack("parts", "deep supervision: the head is called after every block, losses weighted by depth")
def deep_supervision(t: Trial) -> None:
    class Model(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            x, losses = self.stem(x), []
            for number, block in enumerate(self.blocks):
                x = block(x)
                losses.append(self.loss(self.head(x), y) / (2 - number))
            return torch.stack(losses).sum()

    train(t, Model([Block(), Block()], sequential=False))


@attack("parts", "several heads in a ModuleList, each for its own token (multi-token prediction)")
def several_heads(t: Trial) -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.others = nn.ModuleList(nn.ModuleDict({"head": nn.Linear(WIDTH, NUM_CLASSES)}) for _ in range(2))

        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            x = self.features(x)
            losses = [_flat(self.head(x), y)]
            for shift, each in enumerate(self.others, 1):
                losses.append(_flat(each["head"](x[:, :-shift]), y[:, shift:]))
            return sum(losses)

    train(t, Model())


@attack("parts", "logits are given other memory under no_grad (set_) before their loss")
def logits_set(t: Trial) -> None:
    class Model(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            logits = self.head(self.features(x))
            with torch.no_grad():
                logits.set_(0.1 * torch.ones(logits.shape))
            return logits if y is None else self.loss(logits, y)

    train(t, Model())


@attack("parts", "the data of logits is set before their loss, to a buffer that is scaled afterwards")
def logits_data_set(t: Trial) -> None:
    class Model(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            logits = self.head(self.features(x))
            kept = 0.5 * logits.detach()
            logits.data = kept
            kept.mul_(0.5)
            return logits if y is None else self.loss(logits, y)

    train(t, Model())
