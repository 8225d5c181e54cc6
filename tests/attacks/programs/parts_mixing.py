"""Blocks and models that mix tokens, pixels or examples, in ways that a probe with a few values does not see."""

from typing import Any

import torch
from tests.attacks.models import NUM_CLASSES, WIDTH, Block, Images, Net, images, tokens, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


def _small(step: int) -> Any:
    """Two examples of six tokens: tiles are cut along the tokens."""
    return tokens(step, batch=2)


def _one(step: int) -> Any:
    """One example of eight tokens."""
    return tokens(step, batch=1, length=8)


@attack("parts", "tokens are mixed by a branch whose last layer is zero at the beginning (zero-init residual)")
def zero_initialised_mixer(t: Trial) -> None:
    class Mixing(Block):
        def __init__(self) -> None:
            super().__init__()
            self.mixed = nn.Linear(WIDTH, WIDTH)
            nn.init.zeros_(self.mixed.weight)
            nn.init.zeros_(self.mixed.bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x) + self.mixed(x.mean(1, keepdim=True))

    train(t, Net([Mixing(), Mixing()]), batch=_small)


@attack("parts", "examples are mixed by a branch behind a gate that is zero at the beginning (ReZero)")
def rezero_over_examples(t: Trial) -> None:
    class Mixing(Block):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x) + self.gate * (x - x.mean(0, keepdim=True))

    train(t, Net([Mixing(), Mixing()]), num_steps=5)


@attack("parts", "examples are mixed with a weight of one in a million (a small auxiliary term)")
def tiny_mixing_weight(t: Trial) -> None:
    class Model(Net):
        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            spread = logits.mean(1).var(0).sum()
            return super().loss(logits, y) + 1e-5 * spread

    train(t, Model())


@attack("parts", "a penalty on the batch's statistics whose weight starts at zero and is raised by the loop")
def penalty_that_starts_later(t: Trial) -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.weight = 0.0

        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().loss(logits, y) + self.weight * logits.flatten(0, 1).var(0).sum()

    model = Model()

    def warm_up(step: int) -> None:
        model.weight = 0.5 * max(0, step - 1)

    train(t, model, num_steps=5, before=warm_up)


@attack("parts", "the block scales by x.shape[0]")
def scales_by_batch(t: Trial) -> None:
    class Scaling(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x) / x.shape[0]

    train(t, Net([Scaling(), Scaling()]))


@attack("parts", "the block scales by x.size(1), the length")
def scales_by_length(t: Trial) -> None:
    class Scaling(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x) * x.size(1) ** -0.5

    train(t, Net([Scaling(), Scaling()]), batch=_small)


@attack("parts", "the block takes another way for long inputs (if x.shape[1] > 5)")
def branches_by_length(t: Trial) -> None:
    class Branching(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + (self.inner(x) if x.shape[1] > 5 else torch.tanh(self.inner(x)))

    train(t, Net([Branching(), Branching()]), batch=_small)


@attack("parts", "the block mixes only when there are more tokens than a probe has (numel > 30)")
def mixes_large_inputs(t: Trial) -> None:
    class Mixing(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + self.inner(x)
            return y - y.mean((0, 1)) if x.numel() > 30 else y

    train(t, Net([Mixing(), Mixing()]))


@attack("parts", "token shift (RWKV): each token sees the one before it")
def token_shift(t: Trial) -> None:
    class Shifting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.ZeroPad2d((0, 0, 1, -1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(0.5 * x + 0.5 * self.shift(x))

    train(t, Net([Shifting(), Shifting()]), batch=_small)


@attack("parts", "cumsum over the tokens")
def cumulative_sum(t: Trial) -> None:
    class Summing(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(0.1 * x.cumsum(1))

    train(t, Net([Summing(), Summing()]), batch=_small)


@attack("parts", "roll over the tokens (Swin, FNet)")
def rolled(t: Trial) -> None:
    class Rolling(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(torch.roll(x, 1, dims=1))

    train(t, Net([Rolling(), Rolling()]), batch=_small)


@attack("parts", "tokens are sorted")
def sorted_tokens(t: Trial) -> None:
    class Sorting(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x.sort(dim=1).values)

    train(t, Net([Sorting(), Sorting()]), batch=_small)


@attack("parts", "the batch is reversed by flip inside the block")
def flipped_batch(t: Trial) -> None:
    class Flipping(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 0.5 * self.inner(x.flip(0))

    train(t, Net([Flipping(), Flipping()]))


@attack("parts", "softmax over the tokens in place of the features")
def softmax_over_tokens(t: Trial) -> None:
    class Pooling(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x * functional.softmax(x, dim=1))

    train(t, Net([Pooling(), Pooling()]), batch=_small)


@attack("parts", "the mean over the tokens is written with an einsum")
def einsum_over_tokens(t: Trial) -> None:
    class Pooling(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x) + torch.einsum("btc->bc", x)[:, None] / 100

    train(t, Net([Pooling(), Pooling()]), batch=_small)


@attack("parts", "routing to experts with a capacity (Switch): tokens compete for places")
def routing_with_capacity(t: Trial) -> None:
    class Routed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            flat = x.reshape(-1, WIDTH)
            gates = functional.softmax(self.router(flat), dim=-1)
            capacity = len(flat) // 3
            chosen = gates[:, 0].topk(capacity).indices
            update = torch.zeros_like(flat).index_add(0, chosen, self.inner(flat[chosen]) * gates[chosen, :1])
            return (flat + update).reshape(x.shape)

    train(t, Net([Routed(), Routed()]))


@attack("parts", "routing whose balancing loss is added to an attribute and to the loss")
def balancing_loss(t: Trial) -> None:
    class Routed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 2)
            self.balance: torch.Tensor | float = 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gates = functional.softmax(self.router(x), dim=-1)
            self.balance = gates.mean((0, 1)).square().sum()
            return x + gates[..., :1] * self.inner(x)

    class Model(Net):
        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().loss(logits, y) + 0.1 * sum(block.balance for block in self.blocks)

    train(t, Model([Routed(), Routed()], sequential=False))


@attack("parts", "a time-first recurrent net: the first dimension is time")
def time_first_rnn(t: Trial) -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = nn.GRU(WIDTH, WIDTH)

        def features(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks(self.recurrent(self.stem(x))[0])

    train(t, Model(), batch=lambda step: tokens(step, batch=6, length=4))


@attack("parts", "a recurrence written by hand over the first dimension")
def scan_by_hand(t: Trial) -> None:
    class Scanning(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state, outputs = torch.zeros_like(x[0]), []
            for token in x:
                state = 0.5 * state + self.inner(token)
                outputs.append(state)
            return x + torch.stack(outputs)

    train(t, Net([Scanning(), Scanning()]))


class _BatchScaled(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (gradient,) = gradients
        return gradient / gradient.flatten(0, -2).norm(dim=0).clamp(min=1e-3)


@attack("parts", "a custom autograd function whose backward normalises over the batch")
def batch_dependent_backward(t: Trial) -> None:
    class Normalising(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _BatchScaled.apply(x + self.inner(x))

    train(t, Net([Normalising(), Normalising()]), num_steps=3)


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (gradient,) = gradients
        return -0.5 * gradient - 0.1 * gradient.mean((0, 1))


@attack("parts", "gradient reversal that centres over the batch (domain adaptation)")
def gradient_reversal_centred(t: Trial) -> None:
    class Reversing(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + _Reversed.apply(self.inner(x))

    train(t, Net([Reversing(), Reversing()]))


@attack("parts", "a tensor hook in the block that clips the gradient by its norm over the batch")
def tensor_hook_over_batch(t: Trial) -> None:
    class Clipped(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            if y.requires_grad:
                y.register_hook(lambda gradient: gradient / (1.0 + 10 * gradient.norm()))
            return x + y

    train(t, Net([Clipped(), Clipped()]))


@attack("parts", "activation penalties by forward hooks that the loop adds to the loss")
def penalty_by_hooks(t: Trial) -> None:
    model = Net(sequential=False)
    penalties: list[torch.Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, __, output: penalties.append(output.square().mean()))

    class Model(nn.Module):
        returns_loss = True

        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            penalties.clear()
            loss = self.net(x, y)
            return loss + 0.1 * sum(penalties)

    train(t, Model())


@attack("parts", "a hook on a layer inside the block penalises activations by a gradient of its own")
def penalty_inside_block(t: Trial) -> None:
    model = Net()
    for block in model.blocks:
        block.wide.register_forward_hook(lambda _, __, output: output + 0.1 * (output - output.mean((0, 1))))
    train(t, model)


@attack("parts", "batch norm inside a chain of convolutions, in training")
def batch_norm_in_chain(t: Trial) -> None:
    train(
        t,
        Images([nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)]),
        batch=images,
    )


@attack("parts", "batch norm in a chain, in eval at first and in training later")
def batch_norm_in_chain_later(t: Trial) -> None:
    model = Images([nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)])
    train(t, model, batch=images, num_steps=5, before=lambda step: model.chain[1].train(step >= 2))


@attack("parts", "group norm and squeeze-excitation in a chain")
def squeeze_in_chain(t: Trial) -> None:
    class Squeeze(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Conv2d(4, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))

    train(
        t,
        Images([nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), Squeeze(), nn.Conv2d(4, 4, 3, padding=1)]),
        batch=images,
    )


@attack("parts", "a Conv2d subclass that standardises its weight, and one that pads by reflection")
def unusual_convolutions(t: Trial) -> None:
    class Standardised(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self._conv_forward(x, self.weight - self.weight.mean((1, 2, 3), keepdim=True), self.bias)

    train(
        t,
        Images([Standardised(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")]),
        batch=images,
    )


@attack("parts", "dropout in a chain whose rate starts at zero")
def dropout_in_chain_later(t: Trial) -> None:
    model = Images([nn.Conv2d(3, 4, 3, padding=1), nn.Dropout(0.0), nn.Conv2d(4, 4, 3, padding=1)])

    def warm_up(step: int) -> None:
        model.chain[1].p = 0.2 * max(0, step - 1)

    train(t, model, batch=images, num_steps=5, before=warm_up)


@attack("parts", "a hook on a convolution of the chain, registered after two steps")
def hook_in_chain_later(t: Trial) -> None:
    model = Images()

    def later(step: int) -> None:
        if step == 1:
            model.chain[0].register_forward_hook(lambda _, __, output: output - output.mean((2, 3), keepdim=True))

    train(t, model, batch=images, num_steps=5, after=later)


@attack("parts", "a convolution over tokens in the block (Conformer), with a weight that is small at first")
def convolution_over_tokens(t: Trial) -> None:
    class Convolving(Block):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = nn.Parameter(torch.zeros(WIDTH, 1, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mixed = functional.conv1d(x.transpose(1, 2), self.kernel, padding=1, groups=WIDTH)
            return x + self.inner(x) + mixed.transpose(1, 2)

    train(t, Net([Convolving(), Convolving()]), batch=_one)


@attack("parts", "global attributes computed from the input of the whole model (a mask cached before the blocks)")
def mask_attribute_of_whole_batch(t: Trial) -> None:
    class Masked(Block):
        mask: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.mask is not None
            return x + self.inner(x) * self.mask[: x.shape[0], : x.shape[1]]

    class Model(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            mask = (x.detach().sum(-1, keepdim=True) > 0).to(x.dtype)
            for block in self.blocks:
                block.mask = mask
            return super().features(x)

    train(t, Model([Masked(), Masked()]))


@attack("parts", "positions made with torch.arange(x.size(1)) inside the block")
def positions_inside(t: Trial) -> None:
    class Positioned(Block):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(16, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x) + 0.1 * self.table(torch.arange(x.size(1)))

    train(t, Net([Positioned(), Positioned()]), batch=_one)


@attack("parts", "a counter of tokens seen is kept in the block and scales it")
def tokens_seen(t: Trial) -> None:
    class Seen(Block):
        def __init__(self) -> None:
            super().__init__()
            self.seen = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += x.shape[0] * x.shape[1]
            return x + self.inner(x) / (1 + 0.01 * self.seen)

    train(t, Net([Seen(), Seen()]))


@attack("parts", "ghost batch norm: statistics over groups of two examples")
def ghost_batch_norm(t: Trial) -> None:
    class Ghost(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = [part - part.mean((0, 1)) for part in x.split(2, dim=0)]
            return x + self.inner(torch.cat(parts))

    train(t, Net([Ghost(), Ghost()]))


@attack("parts", "the standard deviation over the minibatch as a feature (StyleGAN's discriminator)")
def minibatch_deviation(t: Trial) -> None:
    class Model(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = super().features(x)
            return x * (1 + 1e-3 * x.std(0).mean())

    train(t, Model())


@attack("parts", "quantiles of the activations clip them (a data-dependent range)")
def clipped_by_quantile(t: Trial) -> None:
    class Clipped(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            limit = x.detach().abs().max()
            return x + self.inner(x.clamp(-0.9 * limit, 0.9 * limit))

    train(t, Net([Clipped(), Clipped()]))


@attack("parts", "mixup inside the model, with a partner that is the next example")
def manifold_mixup(t: Trial) -> None:
    class Model(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            x = self.features(x)
            logits = self.head(0.8 * x + 0.2 * torch.cat([x[1:], x[:1]]))
            assert y is not None and logits.shape[-1] == NUM_CLASSES
            return 0.8 * self.loss(logits, y) + 0.2 * self.loss(logits, torch.cat([y[1:], y[:1]]))

    train(t, Model())
