"""A number that is another one in each step is proved in each, which is said once; in a tensor it costs no proof."""

import pytest
import torch
from tests.cpu.module_training import choice
from torch import nn
from torch.nn import functional

from tightfit.runtime.apply import apply_choices

WIDTH, CLASSES, STEPS = 8, 5, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.rate = 1.0
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x))) * self.rate * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(self.block(x)).flatten(0, 1), y.flatten())


CHOICES = {
    "micro_batches": choice("micro_batches", "batch", num_parts=2, draws_anew=False),
    "tiled_tokens": choice("tiled_tokens", "Net.block", num_tiles=2),
}


@pytest.mark.parametrize("in_tensor", [False, True])
@pytest.mark.parametrize("technique", CHOICES)
def test_a_number_that_changes_in_each_step_is_said_once(technique: str, in_tensor: bool) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with apply_choices([CHOICES[technique]], model, [optimizer]) as session:
        for step in range(STEPS):
            if in_tensor:
                model.block.scale.fill_(1 - step / 50)
            else:
                model.block.rate = 1 - step / 50
            optimizer.zero_grad()
            model(torch.randn(4, 6, WIDTH), torch.randint(0, CLASSES, (4, 6))).backward()
            optimizer.step()
        said = [note for note in session.notes if note.startswith(f"{technique} repeats its check in every step")]
    assert len(said) == (0 if in_tensor else 1)


class Sized(Block):
    """Depends on the number of rows from the second call on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * (1 + 0.01 * x.numel()) if self.rate < 1 else x)


@pytest.mark.parametrize("technique", CHOICES)
def test_batches_of_many_sizes_that_run_whole_are_said_once(technique: str) -> None:
    torch.manual_seed(0)
    model = Net()
    model.block = Sized()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with apply_choices([CHOICES[technique]], model, [optimizer]) as session:
        for size in (4, 6, 8, 10):
            optimizer.zero_grad()
            model(torch.randn(size, size, WIDTH), torch.randint(0, CLASSES, (size, size))).backward()
            optimizer.step()
            model.block.rate = 0.5
        assert len([note for note in session.notes if " a later " in note]) == 1, session.notes
