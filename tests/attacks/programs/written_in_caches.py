"""Tables in an `lru_cache`, which no snapshot of a model's state sees, that blocks begin to write to in place."""

import functools

import torch
from tests.attacks.models import WIDTH, Block, Net, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial

_BEGINS = 3


def _trained(t: Trial, *, by_data: bool = False) -> None:
    @functools.lru_cache(maxsize=1)
    def table() -> torch.Tensor:
        return torch.linspace(0, 1, WIDTH)

    class Placed(Block):
        step = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            places = table()
            if Placed.step >= _BEGINS:
                (places.data if by_data else places[:-1]).mul_(0.8)
            return super().forward(x + places)

    def before(step: int) -> None:
        Placed.step = step

    train(t, Net([Placed(), Placed()]), num_steps=_BEGINS + 3, before=before)


@attack("parts", "blocks write from step 4 on to a view of a table that is cached for all lengths (lru_cache)")
def cached_table_written_late(t: Trial) -> None:
    _trained(t)


@attack("parts", "the same through .data")
def cached_table_written_late_by_data(t: Trial) -> None:
    _trained(t, by_data=True)
