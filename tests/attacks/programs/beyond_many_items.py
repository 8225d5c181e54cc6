"""Counts that a block writes where no walk of its state looks at things one by one: at the end of long containers, behind very many objects."""

from collections.abc import Callable
from typing import Any

import torch
from tests.attacks.models import Block, Net, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial

RERUN = ("checkpointing", "selective checkpointing", "nested checkpointing", "sequential checkpointing")


def _train(t: Trial, bump: Callable[[], object], read: Callable[[], Any]) -> None:
    class Counting(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            bump()
            return x + self.inner(x)

    train(t, Net([Counting(), Counting()]), num_steps=2, after=lambda _: t.note("seen", read()))


@attack("recomputation", "a block counts in one of five thousand dicts, the last but one", only=RERUN)
def count_in_a_far_dict(t: Trial) -> None:
    seen = [{"seen": 0} for _ in range(5000)]

    def bump() -> None:
        seen[-2]["seen"] += 1

    _train(t, bump, lambda: seen[-2]["seen"])


@attack("recomputation", "a block counts in a list of seventy thousand numbers", only=RERUN)
def count_in_a_long_list(t: Trial) -> None:
    seen = [0] * 70_001

    def bump() -> None:
        seen[12_345] += 1

    _train(t, bump, lambda: seen[12_345])


@attack("recomputation", "a block counts in the last of more dicts than a walk has room for", only=RERUN)
def count_behind_many_objects(t: Trial) -> None:
    seen = [[{"seen": 0} for _ in range(4000)] for _ in range(6)]

    def bump() -> None:
        seen[5][3999]["seen"] += 1

    _train(t, bump, lambda: seen[5][3999]["seen"])
