"""Attention written by hand in forms that a fused kernel lacks, or has with another meaning."""

import math
from typing import Any

import torch
from tests.attacks.models import BATCH, TOKENS, WIDTH, Block, Net, tokens, train
from tests.attacks.places import WITHOUT_TILES
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


class _Attending(Block):
    """One head, written by hand; `weights` makes of its scores what multiplies the values."""

    is_attention = True

    def __init__(self, weights: Any) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.weights = weights
        self.temperature = nn.Parameter(torch.tensor(0.4))
        self.last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens that have looked at each other."""
        scores = self.query(x) @ self.key(x).transpose(-2, -1) / math.sqrt(WIDTH)
        return x + self.inner(self.weights(self, scores) @ self.value(x))


def _attend(t: Trial, weights: Any, **settings: Any) -> None:
    train(t, Net([_Attending(weights), _Attending(weights)]), **settings)


def _causal() -> torch.Tensor:
    return torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)


@attack("clean", "attention by hand with a causal mask of -inf")
def causal_by_triu(t: Trial) -> None:
    _attend(t, lambda _, scores: scores.masked_fill(_causal(), float("-inf")).softmax(-1))


@attack("parts", "attention whose first token may look at nothing: its scores are all -1e9, and it attends evenly")
def row_masked_by_large_number(t: Trial) -> None:
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(0)
    _attend(t, lambda _, scores: scores.masked_fill(mask, -1e9).softmax(-1))


@attack("parts", "the same with finfo.min added, and one with a mask that is added twice")
def row_masked_by_minimum(t: Trial) -> None:
    mask = torch.ones(TOKENS, TOKENS).triu(0) * torch.finfo(torch.float32).min
    _attend(t, lambda _, scores: (scores + mask + mask).softmax(-1))


@attack("parts", "a row that is masked by -inf, and nan_to_num after the softmax")
def row_of_nan_hidden(t: Trial) -> None:
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(0)
    _attend(t, lambda _, scores: scores.masked_fill(mask, float("-inf")).softmax(-1).nan_to_num(), num_steps=2)


@attack("parts", "a softmax over the queries instead of the keys")
def softmax_over_queries(t: Trial) -> None:
    _attend(t, lambda _, scores: scores.softmax(-2))


@attack("parts", "sigmoid attention, and weights that are normalised by hand")
def sigmoid_attention(t: Trial) -> None:
    def weights(_: Any, scores: torch.Tensor) -> torch.Tensor:
        gates = scores.sigmoid()
        return gates / gates.sum(-1, keepdim=True)

    _attend(t, weights)


@attack("parts", "a softmax with one more in its denominator (attention to nothing)")
def softmax_one(t: Trial) -> None:
    _attend(t, lambda _, scores: scores.exp() / (1 + scores.exp().sum(-1, keepdim=True)))


@attack("parts", "scores capped by tanh before the softmax, times a learned temperature")
def capped_scores(t: Trial) -> None:
    _attend(t, lambda module, scores: (torch.tanh(scores / 2) * 2 * module.temperature).softmax(-1))


@attack("parts", "only the three largest scores of each query are kept (sparse attention)")
def largest_scores(t: Trial) -> None:
    def weights(_: Any, scores: torch.Tensor) -> torch.Tensor:
        least = scores.topk(3, dim=-1).values[..., -1:]
        return scores.masked_fill(scores < least, float("-inf")).softmax(-1)

    _attend(t, weights)


@attack("parts", "the entropy of the attention is kept on the block, and added to the loss")
def entropy_penalty(t: Trial) -> None:
    def weights(module: Any, scores: torch.Tensor) -> torch.Tensor:
        p = scores.softmax(-1)
        module.last = -(p * p.clamp(min=1e-9).log()).sum(-1).mean()
        return p

    class Model(Net):
        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().loss(logits, y) + 0.1 * sum(block.last for block in self.blocks)

    train(t, Model([_Attending(weights), _Attending(weights)]))


@attack("parts", "the weights of the attention are kept on the block without gradients, and noted after the step")
def map_kept(t: Trial) -> None:
    def weights(module: Any, scores: torch.Tensor) -> torch.Tensor:
        p = scores.softmax(-1)
        module.last = p.detach().mean((0, 1))
        return p

    model = Net([_Attending(weights), _Attending(weights)])
    train(t, model, after=lambda _: t.note("map", model.blocks[0].last))


@attack("parts", "a bias of distances, of which the slope is learned (ALiBi), added in place")
def learned_distances(t: Trial) -> None:
    at = torch.arange(TOKENS)
    distance = (at[None] - at[:, None]).abs().neg()

    def weights(module: Any, scores: torch.Tensor) -> torch.Tensor:
        scores += distance * module.temperature
        return functional.softmax(scores, dim=-1)

    _attend(t, weights)


@attack("parts", "a mask that depends on the values of the input (padding found by its sum)")
def padding_found(t: Trial) -> None:
    class Attending(_Attending):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = (x.sum(-1) > 2).unsqueeze(1)
            scores = self.query(x) @ self.key(x).transpose(-2, -1)
            return x + self.inner(scores.masked_fill(hidden, -1e9).softmax(-1) @ self.value(x))

    train(t, Net([Attending(None), Attending(None)]))


@attack("parts", "two maps, of which the second is subtracted (differential attention)")
def differential(t: Trial) -> None:
    class Attending(_Attending):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k = self.query(x).chunk(2, -1), self.key(x).chunk(2, -1)
            first, second = ((a @ b.transpose(-2, -1)).softmax(-1) for a, b in zip(q, k, strict=True))
            return x + self.inner((first - self.temperature * second) @ self.value(x))

    train(t, Net([Attending(None), Attending(None)]))


@attack(
    "parts",
    "heads whose keys are shared by groups, by repeat_interleave and by expand",
    only=("attention", "micro-batches", "tiled tokens"),
)
def grouped_keys(t: Trial) -> None:
    class Attending(_Attending):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.query(x).view(*x.shape[:2], 4, 2).transpose(1, 2)
            k = self.key(x)[..., :4].view(*x.shape[:2], 2, 2).transpose(1, 2).repeat_interleave(2, 1)
            v = self.value(x)[..., :2].unsqueeze(1).expand(-1, 4, -1, -1)
            mixed = (q @ k.mT * 2**-0.5).masked_fill(_causal(), float("-inf")).softmax(-1) @ v
            return x + self.inner(mixed.transpose(1, 2).flatten(2))

    train(t, Net([Attending(None), Attending(None)]))


@attack("parts", "attention across examples instead of tokens (row attention)")
def across_examples(t: Trial) -> None:
    class Attending(_Attending):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.transpose(0, 1)
            scores = self.query(x) @ self.key(x).transpose(-2, -1)
            return (x + self.inner(scores.softmax(-1) @ self.value(x))).transpose(0, 1)

    train(t, Net([Attending(None), Attending(None)]))


@attack(
    "parts",
    "axial attention: first over tokens, then over examples, in an einsum",
    only=("attention", "micro-batches", "tiled tokens"),
)
def by_einsum(t: Trial) -> None:
    class Attending(_Attending):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = torch.einsum("bqc,bkc->bqk", self.query(x), self.key(x))
            mixed = torch.einsum("bqk,bkc->bqc", scores.softmax(dim=-1), self.value(x))
            again = torch.einsum("qtc,ktc->tqk", mixed, mixed).softmax(-1)
            return x + self.inner(torch.einsum("tqk,ktc->qtc", again, mixed))

    train(t, Net([Attending(None), Attending(None)]))


@attack("parts", "the softmax is a module with a hook that zeroes the weights of the last token")
def hooked_softmax(t: Trial) -> None:
    class Attending(_Attending):
        def __init__(self) -> None:
            super().__init__(None)
            self.normalise = nn.Softmax(-1)
            self.normalise.register_forward_hook(lambda _, __, out: out * (torch.arange(TOKENS) < TOKENS - 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(self.normalise(self.query(x) @ self.key(x).mT) @ self.value(x))

    train(t, Net([Attending(), Attending()]))


@attack("parts", "scores whose gradient is scaled by a hook, and a straight-through hard maximum")
def hard_attention(t: Trial) -> None:
    def weights(_: Any, scores: torch.Tensor) -> torch.Tensor:
        if scores.requires_grad:
            scores.register_hook(lambda g: g * 0.5)
        p = scores.softmax(-1)
        hard = functional.one_hot(p.argmax(-1), TOKENS).to(p)
        return hard + p - p.detach()

    _attend(t, weights)


@attack("parts", "the gradient is stopped through the scores, but not through the values")
def detached_scores(t: Trial) -> None:
    _attend(t, lambda _, scores: scores.detach().softmax(-1))


@attack("parts", "the softmax is taken in float32 and cast back, its weights dropped out in evaluation too")
def softmax_in_float32(t: Trial) -> None:
    _attend(t, lambda _, scores: functional.softmax(scores, dim=-1, dtype=torch.float32).to(scores))


@attack("parts", "a key-value memory of the step before, without gradients, in front of the keys")
def memory_of_last_step(t: Trial) -> None:
    class Attending(_Attending):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen = x if self.last is None else torch.cat([self.last, x], 1)
            self.last = x.detach()
            weights = (self.query(x) @ self.key(seen).mT / WIDTH**0.5).softmax(-1)
            return x + self.inner(weights @ self.value(seen))

    train(t, Net([Attending(None), Attending(None)]))


@attack("parts", "lengths as an argument of the model, of which the blocks make a mask kept on a shared object")
def lengths_as_argument(t: Trial) -> None:
    shared: dict[str, Any] = {}

    class Attending(_Attending):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = self.query(x) @ self.key(x).mT
            return x + self.inner(scores.masked_fill(shared["hidden"], float("-inf")).softmax(-1) @ self.value(x))

    class Model(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            shared["hidden"] = (torch.arange(x.shape[1])[None] >= lengths[:, None]).unsqueeze(1)
            return super().forward(x, y)

    train(t, Model([Attending(None), Attending(None)]), batch=lambda step: (*tokens(step), torch.arange(2, 2 + BATCH)))


@attack("clean", "an encoder layer of torch's in every block, without dropout", only=WITHOUT_TILES)
def encoder_layers(t: Trial) -> None:
    blocks = [nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)]
    train(t, Net(blocks))


@attack("parts", "torch's multi-head attention with its averaged weights, dropout, and a padding mask")
def multihead_attention(t: Trial) -> None:
    class Attending(Block):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.zeros(x.shape[:2], dtype=torch.bool)
            hidden[:, -1] = True
            mixed, weights = self.attention(x, x, x, key_padding_mask=hidden)
            return x + self.inner(mixed) * weights.sum(-1, keepdim=True)

    train(t, Net([Attending(), Attending()]))


def _masked_by_another_name(other: Any) -> Any:
    def weights(_: Any, scores: torch.Tensor) -> torch.Tensor:
        same = other(scores)
        same.masked_fill_(_causal(), float("-inf"))
        return scores.softmax(-1)

    return weights


@attack(
    "parts",
    "scores that are masked in place by another name, which a cast to the type that they have gives",
    only=("attention",),
)
def masked_by_name_of_cast(t: Trial) -> None:
    _attend(t, _masked_by_another_name(lambda scores: scores.to(scores.dtype)))


@attack("parts", "the same by contiguous()", only=("attention",))
def masked_by_name_of_contiguous(t: Trial) -> None:
    _attend(t, _masked_by_another_name(lambda scores: scores.contiguous()))


@attack("parts", "the same by a dropout that drops nothing", only=("attention",))
def masked_by_name_of_dropout(t: Trial) -> None:
    _attend(t, _masked_by_another_name(lambda scores: functional.dropout(scores, 0.0)))
