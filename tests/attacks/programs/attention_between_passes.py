"""What scores of attention are made of, written past torch between forward and backward pass: a kernel computes them again in its backward pass."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tests.attacks.models import TOKENS, WIDTH, Net
from tests.attacks.places import EXACT
from tests.attacks.programs.changed_between_passes import changed_between
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn


class Attention(nn.Module):
    """By hand, with a bias, a scale and a mask that the loop writes to."""

    is_attention = True

    def __init__(self, scored: Callable[["Attention", torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("bias", torch.zeros(TOKENS, TOKENS))
        self.register_buffer("scale", torch.tensor(0.3))
        self.register_buffer("mask", torch.ones(TOKENS, TOKENS).tril().bool())
        self.table = np.zeros((TOKENS, TOKENS))
        self.scored = scored

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens of the same shape."""
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(self.scored(self, q @ k.transpose(-1, -2)).softmax(-1) @ v)


def written_between(t: Trial, scored: Any, write: Callable[[Attention, int], Any]) -> None:
    """The loop, with a write to each block between the passes."""
    model = Net([Attention(scored), Attention(scored)])

    def change(step: int) -> None:
        for block in model.blocks:
            write(block, step)

    changed_between(t, model, change)


@attack("gradients", "a bias of attention's scores is written through .data between the passes", only=EXACT)
def attention_bias_written_by_data(t: Trial) -> None:
    written_between(t, lambda a, s: s * 0.3 + a.bias, lambda a, step: a.bias.data[step].add_(0.5))


@attack(
    "gradients",
    "a bias of attention's scores is written in place between the passes, which an addition does not mind",
    only=EXACT,
)
def attention_bias_written_in_place(t: Trial) -> None:
    written_between(t, lambda a, s: s * 0.3 + a.bias, lambda a, step: a.bias[step].add_(0.5))


@attack("gradients", "a bias of attention's scores lies in an array of numpy's, written between the passes", only=EXACT)
def attention_bias_written_by_numpy(t: Trial) -> None:
    def write(a: Attention, step: int) -> None:
        a.table[step] += 0.5

    written_between(t, lambda a, s: s * 0.3 + torch.from_numpy(a.table), write)


@attack(
    "gradients",
    "the scale of attention's scores is a buffer that is written through .data between the passes",
    only=EXACT,
)
def attention_scale_written_by_data(t: Trial) -> None:
    written_between(t, lambda a, s: s * a.scale, lambda a, _: a.scale.data.mul_(1.3))


@attack(
    "gradients",
    "attention's scores are divided by a buffer that is written through .data between the passes",
    only=EXACT,
)
def attention_divisor_written_by_data(t: Trial) -> None:
    written_between(t, lambda a, s: s / a.scale, lambda a, _: a.scale.data.mul_(1.1))


@attack("gradients", "the mask of attention's scores is written through .data between the passes", only=EXACT)
def attention_mask_written_by_data(t: Trial) -> None:
    def write(a: Attention, step: int) -> None:
        a.mask.data[-1, step] = False

    written_between(t, lambda a, s: (s * 0.3).masked_fill(~a.mask, float("-inf")), write)


@attack("gradients", "the weights of attention's projection are written through .data between the passes", only=EXACT)
def attention_weights_written_by_data(t: Trial) -> None:
    def write(a: Attention, _: int) -> None:
        a.qkv.weight.data.mul_(1.05)

    t.writes_within_step("qkv.weight")
    written_between(t, lambda a, s: s * 0.3, write)


@attack(
    "gradients", "scores are filled where a buffer says, which is written through .data between the passes", only=EXACT
)
def attention_fill_written_by_data(t: Trial) -> None:
    def write(a: Attention, step: int) -> None:
        a.mask.data[step, 0] ^= True

    written_between(t, lambda a, s: (s * 0.3).masked_fill(a.mask.T[:, :], -1e4), write)


@attack(
    "gradients",
    "a slice of a bias by the length of the input is written in place through its whole between the passes",
    only=EXACT,
)
def attention_bias_slice_written(t: Trial) -> None:
    def scored(a: Attention, s: torch.Tensor) -> torch.Tensor:
        return s * 0.3 + a.bias[: s.shape[-2], : s.shape[-1]]

    def write(a: Attention, _: int) -> None:
        a.bias.add_(torch.eye(TOKENS))

    written_between(t, scored, write)
