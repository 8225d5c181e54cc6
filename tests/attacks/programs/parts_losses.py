"""Losses and outputs that are not the mean over the examples of the batch."""

from typing import Any

import torch
from tests.attacks.models import NUM_CLASSES, WIDTH, Net, sgd, tokens, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


class _Losing(Net):
    """A net whose loss is `made`'s."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self._made = made

    def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self._made(logits, y)


def _flat(logits: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return logits.reshape(-1, NUM_CLASSES), y.reshape(-1)


@attack("parts", "cross-entropy with reduction='sum'")
def summed_loss(t: Trial) -> None:
    model = _Losing(lambda logits, y: functional.cross_entropy(*_flat(logits, y), reduction="sum"))
    train(t, model, sgd(model, lr=0.01))


@attack("parts", "a sum over tokens divided by the size of the batch")
def sum_over_batch_size(t: Trial) -> None:
    model = _Losing(lambda logits, y: functional.cross_entropy(*_flat(logits, y), reduction="sum") / y.shape[0])
    train(t, model, sgd(model, lr=0.02))


@attack("parts", "ignore_index, with another number of counting tokens in each example")
def ignored_unevenly(t: Trial) -> None:
    def batch(step: int) -> Any:
        x, y = tokens(step)
        for row in range(len(y)):
            y[row, : row + 1] = -100
        return x, y

    train(t, _Losing(lambda logits, y: functional.cross_entropy(*_flat(logits, y))), batch=batch)


@attack("parts", "ignore_index, with an example in which no token counts")
def example_without_targets(t: Trial) -> None:
    def batch(step: int) -> Any:
        x, y = tokens(step)
        y[:2] = -100
        return x, y

    train(t, _Losing(lambda logits, y: functional.cross_entropy(*_flat(logits, y))), batch=batch)


@attack("parts", "cross-entropy with class weights (a weighted mean)")
def class_weights(t: Trial) -> None:
    weights = torch.linspace(0.1, 3.0, NUM_CLASSES)
    train(t, _Losing(lambda logits, y: functional.cross_entropy(*_flat(logits, y), weight=weights)))


@attack("parts", "label smoothing and a z-loss on the logits")
def smoothing_and_z_loss(t: Trial) -> None:
    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = torch.logsumexp(logits, dim=-1).square().mean()
        return functional.cross_entropy(*_flat(logits, y), label_smoothing=0.1) + 1e-2 * z

    train(t, _Losing(loss))


@attack("parts", "a mean over a mask, written by hand")
def masked_mean_by_hand(t: Trial) -> None:
    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        each = functional.cross_entropy(*_flat(logits, y), reduction="none").reshape(y.shape)
        mask = torch.arange(y.shape[1])[None] <= y[:, :1]
        return (each * mask).sum() / mask.sum()

    train(t, _Losing(loss))


@attack("parts", "focal weights that are normalised over the batch")
def normalised_focal(t: Trial) -> None:
    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        each = functional.cross_entropy(*_flat(logits, y), reduction="none")
        weight = (1 - torch.exp(-each.detach())).square()
        return (each * weight / weight.sum()).sum()

    train(t, _Losing(loss))


@attack("parts", "hard example mining: the mean of the top half of the losses")
def hard_examples(t: Trial) -> None:
    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        each = functional.cross_entropy(*_flat(logits, y), reduction="none")
        return each.topk(len(each) // 2).values.mean()

    train(t, _Losing(loss))


@attack("parts", "an InfoNCE loss over in-batch negatives, computed inside the model")
def contrastive_inside(t: Trial) -> None:
    class Model(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            features = functional.normalize(self.features(x).mean(1), dim=-1)
            other = functional.normalize(self.stem(x).mean(1), dim=-1)
            return functional.cross_entropy(features @ other.T / 0.1, torch.arange(len(x)))

    train(t, Model())


@attack("parts", "a triplet loss with the hardest negative of the batch")
def triplet(t: Trial) -> None:
    class Model(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            features = self.features(x).mean(1)
            distances = torch.cdist(features, features) + 1e3 * torch.eye(len(x))
            nearest = features[distances.argmin(1)]
            return functional.triplet_margin_loss(features, features.roll(1, 0), nearest)

    train(t, Model())


@attack("parts", "Barlow Twins: the cross-correlation of the batch")
def cross_correlation(t: Trial) -> None:
    class Model(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            first, second = self.features(x).mean(1), self.features(x + 0.1).mean(1)
            correlation = functional.normalize(first, dim=0).T @ functional.normalize(second, dim=0)
            return functional.mse_loss(correlation, torch.eye(WIDTH))

    train(t, Model())


@attack("parts", "mean squared error against the mean of the batch")
def against_batch_mean(t: Trial) -> None:
    train(
        t,
        _Losing(
            lambda logits, y: functional.mse_loss(
                logits, logits.detach().mean((0, 1), keepdim=True).expand_as(logits) + 1
            )
        ),
    )


@attack("parts", "a last batch that is smaller, and one of a single example")
def smaller_last_batch(t: Trial) -> None:
    sizes = (4, 4, 3, 2, 1)
    train(t, Net(), num_steps=5, batch=lambda step: tokens(step, batch=sizes[step]))


@attack("parts", "a batch that grows while training (a curriculum)")
def growing_batch(t: Trial) -> None:
    train(t, Net(), batch=lambda step: tokens(step, batch=2 + 2 * step))


@attack("parts", "batch norm over features in the model that returns its loss")
def batch_norm_in_model(t: Trial) -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def features(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(super().features(x).transpose(1, 2)).transpose(1, 2)

    train(t, Model())


@attack("parts", "batch norm in eval for two steps, then in training")
def batch_norm_in_model_later(t: Trial) -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def features(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(super().features(x).transpose(1, 2)).transpose(1, 2)

    model = Model()
    train(t, model, num_steps=5, before=lambda step: model.norm.train(step >= 2))


class _Both(nn.Module):
    """Returns the loss and something besides, as Hugging Face's models do."""

    returns_loss = True

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        features = self.net.features(x)
        logits = self.net.head(features)
        return {"loss": self.net.loss(logits, y), "logits": logits, "features": features}


@attack("parts", "logits besides the loss are used in a second loss (distillation)")
def second_loss_from_logits(t: Trial) -> None:
    model = _Both()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        output = model(*tokens(step))
        loss = output["loss"] + 0.5 * output["logits"].square().mean()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("parts", "features besides the loss are used in a second backward pass")
def second_backward_from_features(t: Trial) -> None:
    model = _Both()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        output = model(*tokens(step))
        output["loss"].backward(retain_graph=True)
        output["features"].norm().backward()
        optimizer.step()
        t.note("loss", output["loss"])
        t.end_step()


@attack("parts", "the loop reads the logits and counts hits")
def reads_logits(t: Trial) -> None:
    model = _Both()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        x, y = tokens(step)
        output = model(x, y)
        output["loss"].backward()
        optimizer.step()
        t.note("loss", output["loss"])
        t.note("hits", (output["logits"].argmax(-1) == y).sum())
        t.end_step()


@attack("parts", "the loss is scaled by the loop, by a factor that changes")
def scaled_loss(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(*tokens(step))
        (loss * 0.5**step).backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("parts", "the loss is squared, or clamped, before the backward pass")
def nonlinear_in_loss(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(*tokens(step))
        (loss.square() if step % 2 else (loss - 0.1).abs() + 0.1).backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("parts", "an auxiliary loss that is kept as an attribute and added by the loop")
def auxiliary_of_model(t: Trial) -> None:
    class Model(Net):
        aux: torch.Tensor | None = None

        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = super().features(x)
            self.aux = x.square().mean()
            return x

    model = Model()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(*tokens(step))
        (loss + 0.1 * model.aux).backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("parts", "an L2 penalty on the weights inside the model's loss")
def weight_penalty_inside(t: Trial) -> None:
    class Model(Net):
        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().loss(logits, y) + 0.01 * sum(p.square().sum() for p in self.parameters())

    train(t, Model())


@attack("parts", "a metric module counts examples inside the forward")
def metric_inside(t: Trial) -> None:
    class Metric(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_calls, self.total = 0, 0

        def forward(self, logits: torch.Tensor, y: torch.Tensor) -> None:
            self.num_calls += 1
            self.total += int((logits.argmax(-1) == y).sum())

    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.metric = Metric()

        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            self.metric(logits, y)
            return super().loss(logits, y)

    train(t, Model())


@attack("parts", "a queue of features (MoCo) is filled inside the forward")
def feature_queue(t: Trial) -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", functional.normalize(torch.randn(12, WIDTH), dim=-1))
            self.register_buffer("position", torch.zeros((), dtype=torch.long))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            features = functional.normalize(self.features(x).mean(1), dim=-1)
            with torch.no_grad():
                target = functional.normalize(self.stem(x).mean(1), dim=-1)
            positive = (features * target).sum(-1, keepdim=True)
            logits = torch.cat([positive, features @ self.queue.T.clone()], 1)
            with torch.no_grad():
                begin = int(self.position)
                self.queue[begin : begin + len(x)] = target
                self.position.fill_((begin + len(x)) % len(self.queue))
            return functional.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))

    train(t, Model())


@attack("parts", "a REINFORCE baseline: the mean reward of the batch")
def baseline_of_batch(t: Trial) -> None:
    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        chosen = functional.log_softmax(logits, -1).gather(-1, y[..., None])[..., 0].sum(1)
        reward = y.to(logits.dtype).mean(1)
        return -(chosen * (reward - reward.mean())).mean()

    model = _Losing(loss)
    train(t, model, sgd(model, lr=0.05))


@attack("parts", "advantages normalised over the batch (PPO), and a clipped ratio")
def normalised_advantages(t: Trial) -> None:
    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        chosen = functional.log_softmax(logits, -1).gather(-1, y[..., None])[..., 0].mean(1)
        reward = y.to(logits.dtype).mean(1)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-3)
        ratio = torch.exp(chosen - chosen.detach())
        return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()

    train(t, _Losing(loss))


@attack("parts", "the head's logits are read by the program, sorted and written to, besides the loss")
def logits_written_to(t: Trial) -> None:
    class Model(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            logits = self.head(self.features(x))
            logits[..., 0] = -5.0
            return self.loss(logits, y)

    train(t, Model())


@attack("parts", "two losses from one head: cross-entropy and a margin on the same logits")
def two_losses_of_head(t: Trial) -> None:
    class Model(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            logits = self.head(self.features(x))
            margin = functional.multi_margin_loss(*_flat(logits, y))
            return self.loss(logits, y) + 0.3 * margin + 0.1 * logits.mean()

    train(t, Model())


@attack("parts", "a tensor hook on the logits scales their gradient")
def hook_on_logits(t: Trial) -> None:
    class Model(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            logits = self.head(self.features(x))
            if logits.requires_grad:
                logits.register_hook(lambda gradient: gradient / (1e-3 + gradient.norm()))
            return self.loss(logits, y)

    model = Model()
    train(t, model, sgd(model, lr=0.02))


@attack("parts", "the head is called twice in a step, for two losses")
def head_called_twice(t: Trial) -> None:
    class Model(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x = self.features(x)
            return self.loss(self.head(x), y) + 0.5 * self.loss(self.head(torch.tanh(x)), y)

    train(t, Model())


@attack("parts", "the head's weight is tied to the stem")
def tied_head(t: Trial) -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(WIDTH, NUM_CLASSES, bias=False)
            self.back = nn.Linear(NUM_CLASSES, WIDTH)
            self.head = nn.Linear(WIDTH, NUM_CLASSES, bias=False)
            self.stem.weight = self.head.weight

        def features(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks(self.back(self.stem(x)))

    train(t, Model())


@attack("parts", "accuracy from logits under no_grad, and their maximum as a temperature of the loss")
def temperature_from_logits(t: Trial) -> None:
    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            temperature = 1.0 + logits.abs().max()
        return functional.cross_entropy(*_flat(logits / temperature, y))

    train(t, _Losing(loss))
