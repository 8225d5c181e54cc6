"""Which operators draw random numbers is told by torch's own tag."""

from pathlib import Path

import pytest
import torch

from tightfit.analysis.profile import Profile
from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.capture.trace import trace
from tightfit.devices.catalogue import find
from tightfit.effects.random_operators import draws
from tightfit.techniques.micro_batches.micro_batches import MicroBatches


@pytest.mark.parametrize(
    "name",
    [
        *(
            "aten.native_dropout",
            "aten.bernoulli_.float",
            "aten.bernoulli",
            "aten.rand",
            "aten.randint.low",
            "aten.normal_",
        ),
        *(
            "aten.uniform_",
            "aten.multinomial",
            "aten.exponential_",
            "aten.rrelu_with_noise",
            "aten.poisson",
            "randperm",
        ),
    ],
)
def test_what_always_draws_is_known(name: str) -> None:
    assert draws(name)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "aten.mm",
            "aten.add.Tensor",
            "aten.native_dropout_backward",
            "aten.empty.memory_format",
            "custom::op",
            "gelu",
        ),
        # These draw at a rate, which only who runs them knows.
        *("aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_efficient_attention", "lstm"),
    ],
)
def test_what_draws_not_or_only_at_a_rate_is_not(name: str) -> None:
    assert not draws(name)


def test_an_operator_of_the_programs_own_is_told_by_its_tag_too() -> None:
    with torch.library._scoped_library("tightfit_test", "DEF") as library:
        library.define("noise(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
        library.define("plain(Tensor x) -> Tensor")
        assert draws("tightfit_test.noise") and draws("tightfit_test.noise.default")
        assert not draws("tightfit_test.plain")
        draws.cache_clear()


OWN = """
import torch
from torch import nn
from torch.nn import functional


@torch.library.custom_op("mine::noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def noise(like: torch.Tensor) -> torch.Tensor:
    return torch.rand(like.shape, device=like.device)


@noise.register_fake
def _(like):
    return torch.empty_like(like)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        hidden = self.linear(x)
        return functional.mse_loss(hidden + noise(hidden.detach()), x)


def train():
    model = Net().cuda()
    optimizer = torch.optim.SGD(model.parameters())
    while True:
        loss = model(torch.ones(16, 64, device="cuda"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
"""


def test_a_plan_knows_an_operator_that_only_the_program_registers(tmp_path: Path) -> None:
    """Options are worked out in another process than the program runs in."""
    (tmp_path / "own.py").write_text(OWN)
    target = GeneratorFunction(location=str(tmp_path / "own.py"), function="train", parameters={})
    tape = trace(target, label="own", device="RTX 4090", num_steps=2).tape
    assert [name for name in tape.random_operators if name.startswith("mine.")]
    assert not hasattr(torch.ops.mine, "noise")
    options = list(MicroBatches().options(Profile(tape, find("RTX 4090"))))
    assert options
    assert all(option.settings["draws_anew"] and not option.exact for option in options)
