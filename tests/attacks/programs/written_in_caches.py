"""What no snapshot of a model's state sees, and blocks begin to write to: tables in an `lru_cache`, files."""

import functools
import tempfile
from pathlib import Path

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


@attack("parts", "blocks write from step 4 on to the data of a table that is cached for all lengths (lru_cache)")
def cached_table_written_late_by_data(t: Trial) -> None:
    _trained(t, by_data=True)


@attack("parts", "from step 4 on a block writes a line to a file in each call, with the other blocks as they were")
def late_lines_in_a_file(t: Trial) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        path.touch()

        class Writing(Block):
            step = 0

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if Writing.step >= _BEGINS:
                    with open(path, "a") as file:
                        file.write("called\n")
                return super().forward(x)

        def before(step: int) -> None:
            Writing.step = step

        train(t, Net([Writing(), Block()]), num_steps=_BEGINS + 3, before=before)
        t.note("lines", len(path.read_text().splitlines()))
