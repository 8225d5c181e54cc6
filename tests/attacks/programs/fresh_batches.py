"""What depends on the batch, the length or on other examples, in models of many kinds: micro-batches, tiles and loss heads."""

import random
from typing import Any

import torch
from tests.attacks.models import NUM_CLASSES, WIDTH, Block, Images, Net, images, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


def _trained(t: Trial, model: nn.Module, batches: list[Any], **kwargs: Any) -> None:
    train(t, model, num_steps=len(batches), batch=lambda step: batches[step], **kwargs)


@attack("parts", "experts with a bias on their scores that the forward moves towards balance (DeepSeek)")
def balanced_by_bias(t: Trial) -> None:
    class Experts(Block):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 3)
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.register_buffer("bias", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = self.router(x).sigmoid()
            chosen = (scores + self.bias).argmax(-1)
            load = torch.bincount(chosen.flatten(), minlength=3).to(x)
            with torch.no_grad():
                self.bias += 0.1 * torch.sign(load.mean() - load)
            out = sum(e(x) * ((chosen == i) * scores[..., i]).unsqueeze(-1) for i, e in enumerate(self.experts))
            return x + out

    train(t, Net([Experts(), Experts()]))


@attack("parts", "a bias of experts that moves only in training and only after the loop says so")
def balanced_later(t: Trial) -> None:
    class Experts(Block):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 2)
            self.register_buffer("bias", torch.zeros(2))
            self.balances = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = (self.router(x) + self.bias).softmax(-1)
            if self.balances:
                self.bias.sub_(0.5 * scores.detach().mean((0, 1)))
            return x + self.inner(x) * scores[..., :1]

    model = Net([Experts(), Experts()])

    def switch(step: int) -> None:
        for block in model.blocks:
            block.balances = step >= 2

    train(t, model, num_steps=5, before=switch)


@attack("parts", "MoCo: a momentum encoder inside the model, updated in its forward, and a queue written at a pointer")
def momentum_and_queue(t: Trial) -> None:
    class Moco(nn.Module):
        returns_loss = True

        def __init__(self) -> None:
            super().__init__()
            self.online, self.target = Net(), Net()
            self.target.load_state_dict(self.online.state_dict())
            self.target.requires_grad_(False)
            self.register_buffer("queue", functional.normalize(torch.randn(8, NUM_CLASSES), dim=-1))
            self.pointer = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = functional.normalize(self.online(x).mean(1), dim=-1)
            with torch.no_grad():
                for a, b in zip(self.target.parameters(), self.online.parameters(), strict=True):
                    a.mul_(0.9).add_(b, alpha=0.1)
                k = functional.normalize(self.target(x).mean(1), dim=-1)
            logits = torch.cat([(q * k).sum(-1, keepdim=True), q @ self.queue.clone().T], 1)
            loss = functional.cross_entropy(logits / 0.2, torch.zeros(len(x), dtype=torch.long))
            with torch.no_grad():
                self.queue[self.pointer : self.pointer + len(x)] = k
                self.pointer = (self.pointer + len(x)) % 8
            return loss

    train(t, Moco(), batch=lambda step: (tokens(step)[0],))


@attack(
    "parts",
    "BYOL: the target is the same model's copy, held outside of the module tree, updated within forward",
    only=EXACT,
)
def target_outside_of_tree(t: Trial) -> None:
    class Byol(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            target = self.__dict__["target"][0]
            with torch.no_grad():
                for a, b in zip(target.parameters(), self.stem.parameters(), strict=True):
                    a.lerp_(b, 0.3)
                goal = target(x)
            return super().forward(x, y) + functional.mse_loss(self.features(x), goal)

    model = Byol()
    model.__dict__["target"] = [nn.Linear(WIDTH, WIDTH).requires_grad_(False)]
    train(t, model)


@attack("parts", "VQ-VAE: dead codes are replaced by rows of the batch, drawn by torch.randperm", only=EXACT)
def codes_revived(t: Trial) -> None:
    class Quantising(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.randn(5, WIDTH))
            self.register_buffer("used", torch.ones(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            flat = x.detach().flatten(0, -2)
            index = torch.cdist(flat, self.codes).argmin(-1)
            self.used.mul_(0.5).add_(torch.bincount(index, minlength=5).to(x), alpha=0.5)
            dead = self.used < 1.0
            if bool(dead.any()):
                self.codes[dead] = flat[torch.randperm(len(flat))[: int(dead.sum())]]
            q = self.codes[index].view_as(x)
            return self.inner(x + (q - x).detach()) + x

    train(t, Net([Quantising(), Quantising()]))


@attack("parts", "Transformer-XL: the memory of the last segment stays on the block, detached")
def segment_memory(t: Trial) -> None:
    class Remembering(Block):
        memory: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen = x if self.memory is None else torch.cat([self.memory, x], 1)
            self.memory = x.detach()
            weights = (x @ seen.mT / WIDTH).softmax(-1)
            return x + self.inner(weights @ seen)

    train(t, Net([Remembering(), Remembering()]))


@attack("parts", "a GRU whose hidden state stays on the model over batches (stateful RNN)")
def stateful_rnn(t: Trial) -> None:
    class Stateful(Net):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.hidden = nn.GRU(WIDTH, WIDTH, batch_first=True), None

        def features(self, x: torch.Tensor) -> torch.Tensor:
            out, hidden = self.rnn(super().features(x), self.hidden)
            self.hidden = hidden.detach()
            return out

    train(t, Stateful())


@attack("parts", "truncated backpropagation: segments of one batch, a step after each, the state handed on by the loop")
def truncated_segments(t: Trial) -> None:
    class Segment(Net):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: torch.Tensor, y: torch.Tensor, h: torch.Tensor) -> Any:  # type: ignore[override]
            out, h = self.rnn(self.features(x), h)
            return self.loss(self.head(out), y), h

    model = Segment()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    h = torch.zeros(1, 4, WIDTH)
    for step in range(4):
        loss, h = model(*tokens(step), h)
        h = h.detach()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.note("h", h)
        t.end_step()


@attack("parts", "an embedding with sparse gradients")
def sparse_embedding(t: Trial) -> None:
    class Sparse(Net):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(9, WIDTH, sparse=True)

        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            assert y is not None
            return super().forward(x + self.words(y), y)

    model = Sparse()
    train(t, model, torch.optim.SGD(model.parameters(), lr=0.1))


@attack("parts", "an embedding with max_norm, which renormalises its rows in place in the forward")
def embedding_with_max_norm(t: Trial) -> None:
    class Limited(Net):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(9, WIDTH, max_norm=1.0)

        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            assert y is not None
            return super().forward(x + self.words(y), y)

    t.writes_within_step("words.weight")
    train(t, Limited())


@attack("recomputation", "an embedding with max_norm inside the blocks")
def embedding_with_max_norm_in_block(t: Trial) -> None:
    class Limited(Block):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(9, WIDTH, max_norm=1.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            index = (x.detach().sum(-1).abs() * 3).long() % 9
            return x + self.inner(x + self.words(index))

    t.writes_within_step("words.weight")
    train(t, Net([Limited(), Limited()]))


@attack("parts", "embedding with scale_grad_by_freq, which counts words over the batch")
def scaled_by_frequency(t: Trial) -> None:
    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(9, WIDTH, scale_grad_by_freq=True)

        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            assert y is not None
            return super().forward(x + self.words(y), y)

    train(t, Scaled())


@attack("recomputation", "an embedding with scale_grad_by_freq inside the blocks, over tokens")
def scaled_by_frequency_in_block(t: Trial) -> None:
    class Scaled(Block):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(3, WIDTH, scale_grad_by_freq=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            index = (x.detach().sum(-1).abs() * 3).long() % 3
            return x + self.inner(x + self.words(index))

    train(t, Net([Scaled(), Scaled()]))


@attack("parts", "fake-quantisation observers (torch.ao) in the blocks: running minimum and maximum")
def observers(t: Trial) -> None:
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    class Quantised(Block):
        def __init__(self) -> None:
            super().__init__()
            self.fake = FakeQuantize(observer=MovingAverageMinMaxObserver, averaging_constant=0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.fake(self.inner(x).float()).to(x)

    train(t, Net([Quantised(), Quantised()]))


@attack("parts", "fake quantisation whose observers are switched off and on by the loop")
def observers_switched(t: Trial) -> None:
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    class Quantised(Block):
        def __init__(self) -> None:
            super().__init__()
            self.fake = FakeQuantize(observer=MovingAverageMinMaxObserver, averaging_constant=0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.fake(self.inner(x).float()).to(x)

    model = Net([Quantised(), Quantised()])

    def switch(step: int) -> None:
        for block in model.blocks:
            block.fake.enable_observer(step % 2 == 1)

    train(t, model, num_steps=5, before=switch)


@attack("parts", "DropBlock in a chain, its rate raised by a count of its own forwards")
def drop_block(t: Trial) -> None:
    class DropBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            mask = (torch.rand(x.shape[0], 1, *x.shape[2:]) < 0.02 * self.calls).to(x)
            return x * (1 - functional.max_pool2d(mask, 3, 1, 1))

    train(t, Images([nn.Conv2d(3, 4, 3, padding=1), DropBlock(), nn.Conv2d(4, 4, 3, padding=1)]), batch=images)


@attack("parts", "convolutions with weight standardisation by a parametrisation, and group norm")
def standardised_chain(t: Trial) -> None:
    class Standardised(nn.Module):
        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)

    first, second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
    nn.utils.parametrize.register_parametrization(first, "weight", Standardised())
    train(t, Images([first, nn.Tanh(), second]), batch=images)


@attack("parts", "spectral_norm on the convolutions of a chain")
def spectral_chain(t: Trial) -> None:
    first = nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 4, 3, padding=1))
    train(t, Images([first, nn.Tanh(), nn.Conv2d(4, 4, 3, padding=1)]), batch=images)


@attack("parts", "SyncBatchNorm and InstanceNorm in a chain")
def instance_norm_chain(t: Trial) -> None:
    train(t, Images([nn.Conv2d(3, 4, 3, padding=1), nn.InstanceNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)]), batch=images)


@attack("parts", "upsampling, pixel shuffle and strided, transposed and dilated convolutions in a chain")
def unusual_chain(t: Trial) -> None:
    layers = [
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.PixelShuffle(2),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Conv2d(2, 4, 3, dilation=2, padding=2),
        nn.ConvTranspose2d(4, 4, 2, stride=2),
        nn.AvgPool2d(2),
    ]
    train(t, Images(layers), batch=images)


@attack("parts", "circular padding, and a Conv2d with padding='same' and an even kernel")
def circular_chain(t: Trial) -> None:
    layers = [nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), nn.Conv2d(4, 4, 4, padding="same")]
    train(t, Images(layers), batch=images)


@attack("parts", "average pooling without counting the padding, and ceil_mode")
def pooling_edges(t: Trial) -> None:
    layers = [
        nn.Conv2d(3, 4, 3, padding=1),
        nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
        nn.Conv2d(4, 4, 1),
    ]
    train(t, Images(layers), batch=lambda step: images(step, size=18))


@attack("parts", "images of odd sizes, that change from step to step")
def odd_sizes(t: Trial) -> None:
    train(t, Images(), batch=lambda step: images(step, size=[7, 9, 8, 5][step]))


@attack("parts", "a batch that is sorted by length and packed (pack_padded_sequence) inside of the model")
def packed_sequences(t: Trial) -> None:
    class Packed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: torch.Tensor, y: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            packed = nn.utils.rnn.pack_padded_sequence(
                self.features(x), lengths, batch_first=True, enforce_sorted=False
            )
            out, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
            return self.loss(self.head(out), y[:, : out.shape[1]])

    lengths = torch.tensor([3, 6, 2, 4])
    train(t, Packed(), batch=lambda step: (*tokens(step), lengths.roll(step)))


@attack("parts", "padding cut to the longest example of the batch inside of the model")
def trimmed_padding(t: Trial) -> None:
    class Trimmed(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            longest = int(mask.sum(1).max())
            return super().forward(x[:, :longest], y[:, :longest])

    def batch(step: int) -> Any:
        x, y = tokens(step)
        mask = torch.arange(6) < torch.tensor([2, 3, 5, 6]).roll(step).view(-1, 1)
        return x, y, mask

    train(t, Trimmed(), batch=batch)


@attack("parts", "a graph network: edges are pairs of indices, the batch's nodes lie in the first dimension")
def graph_network(t: Trial) -> None:
    class Graph(nn.Module):
        returns_loss = True

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.head = nn.Linear(WIDTH, NUM_CLASSES)

        def forward(self, x: torch.Tensor, edges: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x) + torch.zeros_like(x).index_add(0, edges[:, 1], x[edges[:, 0]])
            return functional.cross_entropy(self.head(x), y)

    def batch(step: int) -> Any:
        x, y = tokens(step, batch=8, length=1)
        chance = torch.Generator(torch.get_default_device()).manual_seed(step)
        return x[:, 0], torch.randint(0, 8, (8, 2), generator=chance), y[:, 0]

    train(t, Graph(), batch=batch)


@attack("parts", "two inputs of different batch sizes: support and queries (a prototypical network)", only=EXACT)
def prototypes(t: Trial) -> None:
    class Prototypes(Net):
        def forward(self, support: torch.Tensor, queries: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            centres = super().features(support).mean(1)
            q = super().features(queries).mean(1)
            return functional.cross_entropy(-torch.cdist(self.head(q), self.head(centres)), y)

    def batch(step: int) -> Any:
        x, y = tokens(step)
        return x, tokens(50 + step)[0], y[:, 0] % 4

    train(t, Prototypes(), batch=batch)


@attack("parts", "dropout on whole examples by Python's random list in the collate of the model's forward")
def examples_masked_by_python(t: Trial) -> None:
    class Masked(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            kept = torch.tensor([[[float(random.random() > 0.3)]] for _ in range(len(x))])
            return super().forward(x * kept.to(x), y)

    train(t, Masked())


@attack("parts", "a loss whose mean runs over the examples that it gets right (a moving threshold on the model)")
def moving_threshold(t: Trial) -> None:
    class Selecting(Net):
        threshold = 0.5

        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            each = functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
            self.threshold = 0.9 * self.threshold + 0.1 * float(each.detach().mean())
            return (each * (each.detach() > self.threshold)).mean()

    train(t, Selecting())


@attack("parts", "label smoothing annealed by a step counter of the model")
def smoothing_by_counter(t: Trial) -> None:
    class Annealed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            return functional.cross_entropy(logits.flatten(0, 1), y.flatten(), label_smoothing=0.3 / int(self.steps))

    train(t, Annealed())


@attack("parts", "the last batch of each epoch is smaller by an odd number, evaluation with gradients between")
def epochs_with_evaluation(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(6):
        loss = model(*tokens(step, batch=4 if step % 3 < 2 else 3))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 3 == 2:
            model.eval()
            t.note("eval", model(*tokens(99, batch=2)))
            model.train()
        t.note("loss", loss)
        t.end_step()


@attack("parts", "lengths that grow (a curriculum), positions learned, the longest not trained at first")
def growing_lengths(t: Trial) -> None:
    class Positions(Net):
        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Parameter(torch.randn(10, WIDTH) * 0.1)

        def features(self, x: torch.Tensor) -> torch.Tensor:
            return super().features(x + self.positions[: x.shape[1]])

    train(t, Positions(), num_steps=5, batch=lambda step: tokens(step, length=2 + 2 * step))


@attack("parts", "images of which a view is written in place inside the chain (cutout)")
def cutout_in_chain(t: Trial) -> None:
    class Cutout(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.clone()
            x[:, :, 2:4, 2:4] = 0
            return x

    train(t, Images([nn.Conv2d(3, 4, 3, padding=1), Cutout(), nn.Conv2d(4, 4, 3, padding=1)]), batch=images)


@attack("parts", "coordinates as channels in a chain (CoordConv)")
def coordinates_in_chain(t: Trial) -> None:
    class Coords(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = torch.linspace(-1, 1, x.shape[2]).view(1, 1, -1, 1).to(x)
            return x + rows

    train(t, Images([nn.Conv2d(3, 4, 3, padding=1), Coords(), nn.Conv2d(4, 4, 3, padding=1)]), batch=images)
