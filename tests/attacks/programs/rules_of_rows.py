"""Losses and layers whose operators say less of rows than they seem to: weighted means of errors, norms over all but one dimension, position numbers that are written to."""

import inspect
from collections.abc import Callable

import torch
from tests.attacks.models import WIDTH, Block, Images, Net, images, sgd, tokens, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional

_SPLITS = ("micro-batches",)
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class _Losing(Net):
    def __init__(self, made: Loss) -> None:
        super().__init__()
        self._made = made

    def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self._made(logits, y)


def _trained(t: Trial, made: Loss) -> None:
    model = _Losing(made)
    train(t, model, sgd(model, lr=0.05))


def _given(function: Callable[..., torch.Tensor], weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Older versions of torch take no weights."""
    return {"weight": weight} if "weight" in inspect.signature(function).parameters else {}


def _weights(y: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Another sum in each example."""
    return (y[..., None] + 1.0).expand(logits.shape).to(logits.dtype)


@attack("parts", "a mean of squared errors with a weight for each of them", only=_SPLITS)
def weighted_squared_errors(t: Trial) -> None:
    _trained(
        t,
        lambda logits, y: functional.mse_loss(
            logits, logits.detach().tanh(), **_given(functional.mse_loss, _weights(y, logits))
        ),
    )


@attack("parts", "a mean of absolute errors with a weight for each of them", only=_SPLITS)
def weighted_absolute_errors(t: Trial) -> None:
    _trained(
        t,
        lambda logits, y: functional.l1_loss(
            logits, logits.detach().tanh(), **_given(functional.l1_loss, _weights(y, logits))
        ),
    )


@attack("parts", "a sum of weighted absolute errors", only=_SPLITS)
def summed_absolute_errors(t: Trial) -> None:
    _trained(
        t,
        lambda logits, y: (
            functional.l1_loss(
                logits, logits.detach().tanh(), reduction="sum", **_given(functional.l1_loss, _weights(y, logits))
            )
            / 100
        ),
    )


@attack("parts", "a mean of Huber's errors with a weight for each of them", only=_SPLITS)
def weighted_huber_errors(t: Trial) -> None:
    _trained(
        t,
        lambda logits, y: functional.huber_loss(
            logits, logits.detach().tanh(), **_given(functional.huber_loss, _weights(y, logits))
        ),
    )


class _Norms(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.renorm(self.inner(x), 2.0, 2, 0.1)


@attack("parts", "renorm of each feature over all examples and tokens")
def norm_of_each_feature(t: Trial) -> None:
    train(t, Net([_Norms(), _Norms()]))


class _Chosen(Net):
    """One of two stems, by the number of examples."""

    def __init__(self) -> None:
        super().__init__()
        self.stems = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return super().features(self.stems[len(x) > 2](x))


@attack("parts", "one of two layers, chosen by the size of the batch", only=_SPLITS)
def layer_by_size_of_batch(t: Trial) -> None:
    train(t, _Chosen())


class _Results(Net):
    """One of two results, chosen by the number of examples."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = super().features(x)
        found = [x.tanh(), x.sin()]
        return found[len(x) > 2] * 1.0


@attack("parts", "one of two results, chosen by the size of the batch", only=_SPLITS)
def result_by_size_of_batch(t: Trial) -> None:
    train(t, _Results())


class _Reversed(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.inner(x)
        places = torch.arange(len(x))
        places -= 1
        return torch.cat([x[:, :1] + x[places, 0][:, None], x[:, 1:]], 1)


@attack("parts", "each example adds what another one has, by position numbers that are counted down in place")
def rows_by_changed_numbers(t: Trial) -> None:
    train(t, Net([_Reversed(), _Reversed()]))


@attack("parts", "all tokens count but the first two of the batch", only=_SPLITS)
def first_tokens_do_not_count(t: Trial) -> None:
    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        each = functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
        counts = torch.ones(each.shape)
        counts[:2].zero_()
        return (each * counts).mean()

    _trained(t, loss)


@attack("parts", "the first token of each example does not count, by a flat mask", only=_SPLITS)
def first_of_each_does_not_count(t: Trial) -> None:
    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        each = functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
        counts = torch.ones(each.shape)
        counts[:: y.shape[1]].zero_()
        return (each * counts).mean()

    _trained(t, loss)


class _Bucketed(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x[:, 0, 0].detach(), x[:, 1, 0].detach()
        return x + self.inner(x) * torch.bucketize(first, second)[:, None, None]


@attack("parts", "each example in the bucket that the values of others bound", only=_SPLITS)
def bucket_between_examples(t: Trial) -> None:
    train(t, Net([_Bucketed(), _Bucketed()]))


class _Same(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class _Written(Net):
    """Writes to what a block returns, and reads what it was given."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            after = block(x)
            after += 1.0
            x = after + x
        return x


@attack("parts", "a block that returns its argument, and a loop that writes to what it returns")
def block_of_nothing_written(t: Trial) -> None:
    train(t, _Written([_Same(), Block()], sequential=False))


class _OneByOne(Images):
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        found = torch.stack([self.chain(self.stem(each)).mean((1, 2)) for each in x])
        assert y is not None
        return functional.cross_entropy(self.head(found), y)


@attack(
    "parts",
    "a chain of convolutions that is called with one image at a time, without a batch",
    only=("tiled convolutions",),
)
def images_one_by_one(t: Trial) -> None:
    layers = [nn.Conv2d(3, 4, (3, 5), padding=(1, 2)), nn.Tanh(), nn.Conv2d(4, 4, 3, padding=1)]
    train(t, _OneByOne(layers), batch=images)


class _AsksForFormat(Images):
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        x = self.chain(self.stem(x.to(memory_format=torch.channels_last)))
        x = x * 2.0 if x.is_contiguous(memory_format=torch.channels_last) else x
        assert y is not None
        return functional.cross_entropy(self.head(x.mean((2, 3))), y)


@attack(
    "parts", "code behind a chain of convolutions that asks whether channels come last", only=("tiled convolutions",)
)
def asks_whether_channels_are_last(t: Trial) -> None:
    train(t, _AsksForFormat().to(memory_format=torch.channels_last), batch=images)


class _TokensFirst(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).transpose(0, 1).contiguous().transpose(0, 1)


class _AsksForStrides(Net):
    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            x = x * 2.0 if x.is_contiguous() else x
        return x


@attack("parts", "code behind a block that asks for the strides of what it returns", only=("tiled tokens",))
def asks_for_strides(t: Trial) -> None:
    train(t, _AsksForStrides([_TokensFirst(), _TokensFirst()], sequential=False))


class _AsksForGradient(Net):
    def features(self, x: torch.Tensor) -> torch.Tensor:
        return super().features(x.requires_grad_())


@attack("parts", "a model that asks for the gradient of what it is called with, which the loop reads", only=_SPLITS)
def gradient_of_argument_read(t: Trial) -> None:
    model = _AsksForGradient()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        x, y = tokens(step)
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.note("gradient", x.grad)
        t.end_step()
