"""What is written between the products of a head, or of attention, and what is made of them."""

import torch
from tests.attacks.models import WIDTH, Block, Net, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


@attack("parts", "features are zeroed in place after the head has run, before the loss is taken (memory of features)")
def features_zeroed_before_the_loss(t: Trial) -> None:
    class Zeroed(Net):
        returns_loss = False

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            features = self.features(x)
            logits = self.head(features.clone())
            with torch.no_grad():
                features.zero_()
            return self.loss(logits, y)

    train(t, Zeroed(), num_steps=5)


@attack("parts", "the head's weight is normalised in place through .data between the head and the loss")
def head_normalised_before_the_loss(t: Trial) -> None:
    class Normed(Net):
        returns_loss = False

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            logits = self.head(self.features(x))
            self.head.weight.data.div_(self.head.weight.data.norm(dim=1, keepdim=True))
            return self.loss(logits, y)

    t.writes_within_step("head.weight")
    train(t, Normed(), num_steps=5)


@attack(
    "parts",
    "the head's bias is written in place between the head and the loss, without gradients (a class that is switched off)",
)
def bias_written_before_the_loss(t: Trial) -> None:
    class Off(Net):
        returns_loss = False

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            logits = self.head(self.features(x))
            with torch.no_grad():
                self.head.bias[0] = 0
            return self.loss(logits, y)

    t.writes_within_step("head.bias")
    train(t, Off(), num_steps=5)


class _Attention(Block):
    """Attention by hand, with a place for what is written between its products."""

    is_attention = True

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.full((6, 6), float("-inf")).triu(1))
        self.register_buffer("gain", torch.ones(6, WIDTH))

    def between(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Writes to something."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        query, key, value = query.clone(), key * self.gain, value.clone()
        scores = query @ key.transpose(-2, -1) / WIDTH**0.5 + self.mask
        self.between(query, key, value)
        return x + self.out(functional.softmax(scores, -1) @ value)


def _attend(t: Trial, block: type[_Attention]) -> None:
    train(t, Net([block(), block()]), num_steps=5)


@attack("gradients", "a mask is written through .data between attention's scores and their softmax")
def mask_written_before_softmax(t: Trial) -> None:
    class Written(_Attention):
        def between(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
            self.mask.data[0, 1] = -1.0 if self.mask[0, 1] < -10 else float("-inf")

    _attend(t, Written)


@attack("gradients", "values are scaled through .data between attention's scores and their product")
def values_written_before_product(t: Trial) -> None:
    class Written(_Attention):
        def between(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
            value.data.mul_(1.5)

    _attend(t, Written)


@attack(
    "gradients", "a mask is written through numpy between attention's scores and their softmax, from the fourth step on"
)
def mask_written_later(t: Trial) -> None:
    class Written(_Attention):
        calls = 0

        def between(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
            type(self).calls += 1
            if type(self).calls > 6:
                self.mask.numpy()[0, 1] = -0.1 * type(self).calls

    _attend(t, Written)
