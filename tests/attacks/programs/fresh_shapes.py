"""Arguments whose first dimension only looks like the batch, batches of unusual form, and what mixes rows by a change of shape."""

from typing import Any

import torch
from tests.attacks.models import BATCH, NUM_CLASSES, TOKENS, WIDTH, Block, Images, Net, images, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


class _Square(Net):
    """Mixes its tokens by a matrix that the loop hands over."""

    def forward(self, x: torch.Tensor, mixing: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return self.loss(self.head(self.blocks(mixing @ self.stem(x))), y)


@attack("parts", "as many tokens as examples, and a matrix over tokens as an argument")
def mask_as_large_as_batch(t: Trial) -> None:
    def batch(step: int) -> Any:
        x, y = tokens(step, length=BATCH)
        return x, torch.tril(torch.ones(BATCH, BATCH)) / BATCH, y

    train(t, _Square(), batch=batch)


@attack("parts", "as many tokens as examples, and positions as an argument")
def positions_as_many_as_batch(t: Trial) -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Embedding(16, WIDTH)

        def forward(self, x: torch.Tensor, positions: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.loss(self.head(self.features(x + self.places(positions))), y)

    train(
        t,
        Model(),
        batch=lambda step: (tokens(step, length=BATCH)[0], torch.arange(BATCH), tokens(step, length=BATCH)[1]),
    )


@attack("parts", "time first: the batch is the second dimension of a square input")
def time_first_square(t: Trial) -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(WIDTH, WIDTH)

        def features(self, x: torch.Tensor) -> torch.Tensor:
            return super().features(self.rnn(x)[0])

    train(t, Model(), batch=lambda step: tokens(step, length=BATCH))


@attack("parts", "prototypes of classes as an argument, as many as there are examples")
def prototypes_as_argument(t: Trial) -> None:
    class Model(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor, prototypes: torch.Tensor) -> torch.Tensor:
            scores = self.features(x).mean(1) @ prototypes.T
            return functional.cross_entropy(scores, y[:, 0] % BATCH)

    chance = torch.Generator(torch.get_default_device()).manual_seed(5)
    train(t, Model(), batch=lambda step: (*tokens(step), torch.randn(BATCH, WIDTH, generator=chance)))


@attack("parts", "two inputs of which one has twice as many rows (a query, two documents each)")
def twice_as_many_rows(t: Trial) -> None:
    class Model(Net):
        def forward(self, x: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
            a, b = self.features(x).mean(1), self.features(others).mean(1)
            good, bad = b.chunk(2)
            return -functional.logsigmoid((a * good).sum(-1) - (a * bad).sum(-1)).mean()

    train(t, Model(), batch=lambda step: (tokens(step)[0], tokens(step + 9, batch=2 * BATCH)[0]))


@attack(
    "parts", "two views of each example, one after the other in the batch: the first half is compared with the second"
)
def halves_compared(t: Trial) -> None:
    class Model(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = self.features(x).mean(1).chunk(2)
            return functional.mse_loss(first, second.detach())

    train(t, Model(), batch=lambda step: (tokens(step)[0],))


@attack("parts", "neighbours in the batch are a pair, the same after a reshape")
def neighbours_compared(t: Trial) -> None:
    class Model(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            pairs = self.features(x).mean(1).view(-1, 2, WIDTH)
            return functional.mse_loss(pairs[:, 0], pairs[:, 1])

    train(t, Model(), batch=lambda step: (tokens(step, batch=4 * BATCH)[0],))


@attack("parts", "the batch is padded to a multiple of eight rows with the first ones, and cut again")
def padded_batch(t: Trial) -> None:
    class Model(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            size = len(x)
            x = torch.cat([x, x[: -size % 8]])
            return super().features(x - x.mean(0) * 0.1)[:size]

    train(t, Model(), batch=lambda step: tokens(step, batch=6))


@attack("parts", "the loss is handed the number of tokens of the whole batch (num_items_in_batch)")
def count_as_argument(t: Trial) -> None:
    class Model(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor, count: Any = None) -> torch.Tensor:
            logits = self.head(self.features(x)).reshape(-1, NUM_CLASSES)
            return functional.cross_entropy(logits, y.reshape(-1), reduction="sum") / count

    train(t, Model(), batch=lambda step: (*tokens(step), BATCH * TOKENS))


@attack("parts", "the same with the count as a tensor without dimensions, which differs from batch to batch")
def count_as_tensor(t: Trial) -> None:
    class Model(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
            logits = self.head(self.features(x)).reshape(-1, NUM_CLASSES)
            return functional.cross_entropy(logits, y.reshape(-1), reduction="sum") / count

    def batch(step: int) -> Any:
        x, y = tokens(step)
        y[0, step:] = -100
        return x, y, (y != -100).sum()

    train(t, Model(), batch=batch)


@attack("parts", "weights of examples as an argument, normalised by the loop over the whole batch")
def weights_as_argument(t: Trial) -> None:
    class Model(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            logits = self.head(self.features(x)).transpose(1, 2)
            return (functional.cross_entropy(logits, y, reduction="none").mean(1) * w).sum()

    train(t, Model(), batch=lambda step: (*tokens(step), torch.arange(1.0, BATCH + 1).softmax(0)))


@attack("parts", "weights of examples as an argument, normalised inside of the model")
def weights_normalised_inside(t: Trial) -> None:
    class Model(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            logits = self.head(self.features(x)).transpose(1, 2)
            return (functional.cross_entropy(logits, y, reduction="none").mean(1) * w / w.sum()).sum()

    train(t, Model(), batch=lambda step: (*tokens(step), torch.arange(1.0, BATCH + 1)))


@attack("parts", "batches of four, three, one and no example")
def shrinking_batches(t: Trial) -> None:
    train(t, Net(), batch=lambda step: tokens(step, batch=[4, 3, 1, 1][step]))


@attack("parts", "an empty batch in the middle, with a sum as its loss", only=EXACT)
def empty_batch(t: Trial) -> None:
    class Model(Net):
        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(logits.reshape(-1, NUM_CLASSES), y.reshape(-1), reduction="sum")

    model = Model()
    train(t, model, sgd(model, lr=0.01), batch=lambda step: tokens(step, batch=[4, 0, 4, 2][step]))


@attack("parts", "sequences of one token")
def single_token(t: Trial) -> None:
    train(t, Net(), batch=lambda step: tokens(step, length=1))


@attack("parts", "a batch without a batch dimension: tokens by features")
def unbatched(t: Trial) -> None:
    train(t, Net(), batch=lambda step: tuple(v[0] for v in tokens(step)))


@attack("parts", "the input is a list of tensors of several lengths, which the model pads")
def list_of_sequences(t: Trial) -> None:
    class Model(Net):
        def forward(self, x: list[torch.Tensor], y: torch.Tensor | None = None) -> torch.Tensor:
            padded = nn.utils.rnn.pad_sequence(x, batch_first=True)
            return self.loss(self.head(self.features(padded).mean(1)), y)

    def batch(step: int) -> Any:
        x, y = tokens(step)
        return [x[i, : 2 + i] for i in range(BATCH)], y[:, 0]

    train(t, Model(), batch=batch)


@attack("parts", "the batch is one dict, with a string, a nested list and a flag in it")
def dict_batch(t: Trial) -> None:
    class Model(Net):
        def forward(self, batch: dict[str, Any]) -> torch.Tensor:
            x = batch["x"] if batch["kind"] == "plain" else -batch["x"]
            logits = self.head(self.features(x))
            return self.loss(logits, batch["targets"][0])

    def batch(step: int) -> Any:
        x, y = tokens(step)
        return ({"x": x, "targets": [y, y], "kind": "plain", "flag": True},)

    train(t, Model(), batch=batch)


class _Mixing(Block):
    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens, mixed."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens of the same shape."""
        return x + self.inner(self.mixed(x))


def _train_mixing(t: Trial, mixed: Any, **settings: Any) -> None:
    class Mixing(_Mixing):
        def mixed(self, x: torch.Tensor) -> torch.Tensor:
            return mixed(x)

    train(t, Net([Mixing(), Mixing()]), **settings)


@attack("parts", "tokens by a view with other dimensions (a forgotten transpose)")
def view_scrambles(t: Trial) -> None:
    _train_mixing(t, lambda x: x.view(x.shape[1], x.shape[0], WIDTH).transpose(0, 1))


@attack("parts", "every second token is averaged with its neighbour (strided slices)")
def strided_neighbours(t: Trial) -> None:
    _train_mixing(t, lambda x: torch.stack([(x[:, ::2] + x[:, 1::2]) / 2] * 2, 2).flatten(1, 2))


@attack("parts", "the first token is added to all (CLS)")
def first_token_added(t: Trial) -> None:
    _train_mixing(t, lambda x: x + x[:, :1])


@attack("parts", "quantised by the largest value of the tensor (per-tensor fake quantisation, straight through)")
def quantised_by_maximum(t: Trial) -> None:
    def quantised(x: torch.Tensor) -> torch.Tensor:
        scale = x.detach().abs().max() / 127
        return x + ((x / scale).round() * scale - x).detach()

    _train_mixing(t, quantised)


@attack("parts", "clipped only where the tensor's norm is above a bound, which happens later in training")
def clipped_above_norm(t: Trial) -> None:
    def clipped(x: torch.Tensor) -> torch.Tensor:
        norm = x.detach().norm()
        return x * (14 / norm) if norm > 14 else x

    _train_mixing(t, clipped, num_steps=8)


@attack("parts", "a Fourier transform over tokens (FNet)")
def fourier_over_tokens(t: Trial) -> None:
    _train_mixing(t, lambda x: torch.fft.fft(x, dim=1).real, batch=tokens)


@attack("parts", "interpolated to half as many tokens and back")
def interpolated(t: Trial) -> None:
    def mixed(x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(1, 2)
        return functional.interpolate(functional.interpolate(x, scale_factor=0.5), scale_factor=2.0).transpose(1, 2)

    _train_mixing(t, mixed)


@attack("parts", "instance normalisation of tokens, by its functional form")
def functional_instance_norm(t: Trial) -> None:
    _train_mixing(t, lambda x: functional.instance_norm(x.transpose(1, 2)).transpose(1, 2))


@attack("parts", "normalised in the wrong dimension (F.normalize without a dim: the tokens)")
def normalised_over_tokens(t: Trial) -> None:
    _train_mixing(t, functional.normalize)


@attack("parts", "tokens above the mean of the tensor are doubled")
def doubled_above_mean(t: Trial) -> None:
    _train_mixing(t, lambda x: torch.where(x > x.detach().mean(), 2 * x, x))


@attack("parts", "a mask by the rank of a token among all (token dropping by its norm)")
def kept_by_rank(t: Trial) -> None:
    def kept(x: torch.Tensor) -> torch.Tensor:
        norms = x.detach().norm(dim=-1)
        return x * (norms >= norms.kthvalue(3, dim=-1, keepdim=True).values).unsqueeze(-1)

    _train_mixing(t, kept)


@attack("parts", "distances between all examples (cdist), by which the tokens are scaled")
def distances_between(t: Trial) -> None:
    _train_mixing(t, lambda x: x * torch.cdist(x.flatten(1), x.flatten(1).detach()).mean(1).view(-1, 1, 1) * 0.1)


@attack("parts", "channel shuffle, unshuffle and dropout of whole channels in the chain")
def channel_dropout_in_chain(t: Trial) -> None:
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.ChannelShuffle(2), nn.Dropout2d(0.4), nn.Conv2d(4, 4, 3, padding=1)]
    train(t, Images(layers), batch=images)


@attack("parts", "squeeze-and-excite, softmax over places, and local response normalisation in the chain")
def global_layers_in_chain(t: Trial) -> None:
    class Excite(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.sigmoid(x.flatten(2).logsumexp(-1))[..., None, None]

    train(
        t, Images([nn.Conv2d(3, 4, 3, padding=1), Excite(), nn.LocalResponseNorm(2), nn.Conv2d(4, 4, 1)]), batch=images
    )


@attack("parts", "an in-place activation first in the chain, and the same convolution twice")
def in_place_and_shared_in_chain(t: Trial) -> None:
    shared = nn.Conv2d(4, 4, 3, padding=1)
    layers = [nn.LeakyReLU(inplace=True), nn.Conv2d(3, 4, 3, padding=1), shared, nn.ReLU(inplace=True), shared]
    train(t, Images(layers), batch=images)


@attack("parts", "upsampling, transposed convolutions, dilation and pixel shuffle in the chain, channels last")
def sampling_in_chain(t: Trial) -> None:
    layers = [
        nn.Conv2d(3, 16, 3, padding=2, dilation=2),
        nn.PixelShuffle(2),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1),
        nn.MaxPool2d(3, 2, ceil_mode=True),
    ]
    model = Images(layers).to(memory_format=torch.channels_last)

    def batch(step: int) -> Any:
        x, y = images(step)
        return x.contiguous(memory_format=torch.channels_last), y

    train(t, model, batch=batch)


@attack("parts", "a quantile of all pixels, and a shift of the picture by one row, in the chain")
def shifted_rows_in_chain(t: Trial) -> None:
    class Shift(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.roll(1, 2) - 0.1 * x.detach().flatten(1).quantile(0.5, 1)[:, None, None, None]

    train(t, Images([nn.Conv2d(3, 4, 3, padding=1), Shift(), nn.Conv2d(4, 4, 3, padding=1)]), batch=images)
