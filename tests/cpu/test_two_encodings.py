"""An encoder that runs twice before one backward pass, as in contrastive training, inside of a pipeline of modules."""

from collections.abc import Iterator

import pytest
import torch
from tests.cpu.module_training import DEVICE, promised_peak, timeline, traced
from torch import nn

from tightfit.analysis.profile import Profile
from tightfit.devices.catalogue import find
from tightfit.tape import Tape
from tightfit.techniques.recomputation.checkpointing import Checkpointing
from tightfit.techniques.trained.freezing import Freezing

_NUM_LAYERS = 4


class Layer(nn.Module):
    """A residual layer, whose input's gradient is added up when it has none of its own activations any more."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second, self.norm = (
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
            nn.LayerNorm(width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.second(nn.functional.gelu(self.first(x))))


class Encoder(nn.Module):
    """Tokens, layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(100, width)
        self.layer = nn.ModuleList(Layer(width) for _ in range(_NUM_LAYERS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for each in self.layer:
            x = each(x)
        return x


class Mean(nn.Module):
    """Over the tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


def contrastive(batch: int = 64) -> Iterator[torch.Tensor]:
    """Two encodings of each example, and a loss over both."""
    model = nn.Sequential(Encoder(64), Mean()).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        one, other = (model(torch.randint(0, 100, (batch, 128), device="cuda")) for _ in range(2))
        loss = nn.functional.cross_entropy(one @ other.t(), torch.arange(batch, device="cuda"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@pytest.fixture(scope="module")
def plain() -> Tape:
    return traced(__file__, "contrastive")


def test_layers_that_are_run_again_hold_what_was_promised(plain: Tape) -> None:
    options = [option for option in Checkpointing().options(Profile(plain, find(DEVICE))) if ".layer." in option.where]
    assert [option.where.rpartition(".")[2] for option in options] == [str(i) for i in range(_NUM_LAYERS)]
    before = int(timeline(plain).max())
    promised = promised_peak(plain, options)
    found = int(timeline(traced(__file__, "contrastive", options)).max())
    assert found < 0.5 * before
    assert found == pytest.approx(promised, abs=Checkpointing.tolerance * (before - promised))


def test_the_blocks_of_a_pipeline_are_the_layers_of_its_encoder(plain: Tape) -> None:
    options = list(Freezing().options(Profile(plain, find(DEVICE))))
    assert {option.where for option in options} == {"Sequential.0.layer"}
    # Of three quarters one layer is left.
    assert [option.settings["num_blocks"] for option in options] == [1, 2, 3]
