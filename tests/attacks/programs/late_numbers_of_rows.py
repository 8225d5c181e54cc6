"""From the fourth step on, what is multiplied by a constant is multiplied by how many rows there are, and no snapshot sees the switch: the calls stay the same."""

import types
from collections.abc import Callable

import numpy as np
import torch
from tests.attacks.models import NUM_CLASSES, WIDTH, Block, Net, sgd, tokens
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional

_options = {"by rows": False}
# Whoever holds a proxy cannot be told that the dict behind it has changed.
OPTIONS = types.MappingProxyType(_options)
_BATCH, _ALL = 4, 24


def _train(t: Trial, model: nn.Module) -> None:
    _options["by rows"] = False
    optimizer = sgd(model, lr=0.02)
    t.apply(model, optimizer)
    try:
        for step in range(5):
            _options["by rows"] = step >= 3
            x, y = tokens(step)
            loss = model(x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            t.note("loss", loss)
            t.end_step()
    finally:
        _options["by rows"] = False


def _blocks(t: Trial, scaled: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    class Scaled(Block):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return scaled(super().inner(x), x.shape[0] * x.shape[1])

    _train(t, Net([Scaled(), Scaled()]))


@attack("parts", "a factor is the number of tokens, from the fourth step on")
def factor_by_rows_later(t: Trial) -> None:
    _blocks(t, lambda h, n: h * (n * 0.1 if OPTIONS["by rows"] else _ALL * 0.1))


@attack("parts", "the epsilon of a norm is the number of tokens, from the fourth step on")
def epsilon_by_rows_later(t: Trial) -> None:
    _blocks(t, lambda h, n: functional.layer_norm(h, (WIDTH,), eps=n * 0.1 if OPTIONS["by rows"] else 1.0))


@attack(
    "parts",
    "of two tensors that are made in each step the one with the number of tokens is used, from the fourth step on",
)
def tensor_by_rows_later(t: Trial) -> None:
    def scaled(h: torch.Tensor, n: int) -> torch.Tensor:
        of_rows, constant = torch.tensor(n * 0.1), torch.tensor(_ALL * 0.05)
        return h * (of_rows if OPTIONS["by rows"] else constant)

    _blocks(t, scaled)


class _Summed(Net):
    """The sum over all tokens, scaled."""

    def __init__(self, scale: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        super().__init__()
        self._scale = scale

    def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows = functional.cross_entropy(logits.reshape(-1, NUM_CLASSES), y.reshape(-1), reduction="none")
        return self._scale(rows.sum(), len(logits))


@attack("parts", "a sum of losses is divided by the number of examples instead of a constant, from the fourth step on")
def mean_of_sum_later(t: Trial) -> None:
    _train(t, _Summed(lambda total, n: total * (1 / n if OPTIONS["by rows"] else 1 / _BATCH)))


@attack("parts", "the same by one of two tensors")
def mean_of_sum_by_tensor_later(t: Trial) -> None:
    def scaled(total: torch.Tensor, n: int) -> torch.Tensor:
        of_rows, constant = torch.tensor(float(n)), torch.tensor(float(_BATCH))
        return total / (of_rows if OPTIONS["by rows"] else constant)

    _train(t, _Summed(scaled))


@attack("parts", "a factor is read from numpy, and is the number of tokens from the fourth step on")
def factor_of_numpy_later(t: Trial) -> None:
    def scaled(h: torch.Tensor, n: int) -> torch.Tensor:
        return h * torch.from_numpy(np.array([n * 0.1 if OPTIONS["by rows"] else 1.0])).to(h.dtype)

    _blocks(t, scaled)


@attack("parts", "it is written into a tensor's memory, through numpy's view")
def factor_in_memory_later(t: Trial) -> None:
    def scaled(h: torch.Tensor, n: int) -> torch.Tensor:
        factor = torch.ones(1)
        factor.numpy()[0] = n * 0.1 if OPTIONS["by rows"] else 1.0
        return h * factor

    _blocks(t, scaled)


@attack("parts", "it is written into an array that a tensor has been made of long before")
def factor_in_array_later(t: Trial) -> None:
    array = np.ones(1)
    factor = torch.from_numpy(array)

    def scaled(h: torch.Tensor, n: int) -> torch.Tensor:
        array[0] = n * 0.1 if OPTIONS["by rows"] else 1.0
        return h * factor.to(h.dtype)

    _blocks(t, scaled)


@attack("parts", "a sum is divided by the number of examples, which is written into a buffer that a tensor was made of")
def mean_of_sum_by_buffer_later(t: Trial) -> None:
    def scaled(total: torch.Tensor, n: int) -> torch.Tensor:
        buffer = bytearray(8)
        divisor = torch.frombuffer(buffer, dtype=torch.float64)
        buffer[:] = np.array([n if OPTIONS["by rows"] else _BATCH], np.float64).tobytes()
        return total / divisor[0].to(total.dtype)

    _train(t, _Summed(scaled))
