"""Counts that a block writes where no walk of its state looks at things one by one: at the end of long containers, behind very many objects."""

import types
from collections.abc import Callable
from typing import Any

import numpy as np
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


def _rooted(t: Trial, bump: Callable[[Any], object], read: Callable[[Any], Any]) -> None:
    class Rooted(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            bump(self.root[0])
            return x + self.inner(x)

    model: Any = Net([Rooted(), Rooted()])
    model.stats, model.head.meter = {"seen": 0}, {"seen": 0}
    for block in model.blocks:
        block.root = [model]
    train(t, model, num_steps=2, after=lambda _: t.note("seen", read(model)))


@attack("recomputation", "a block counts in a dict of the whole model, by a name that it makes", only=RERUN)
def count_on_the_model_by_a_made_name(t: Trial) -> None:
    def bump(model: Any) -> None:
        getattr(model, "st" + "ats")["seen"] += 1

    _rooted(t, bump, lambda model: model.stats["seen"])


@attack("recomputation", "a block goes through the model's modules and counts on their parameters", only=RERUN)
def count_on_parameters_of_the_model(t: Trial) -> None:
    def bump(model: Any) -> None:
        for parameter in model.parameters():
            parameter.seen = getattr(parameter, "seen", 0) + 1

    _rooted(t, bump, lambda model: [parameter.seen for parameter in model.parameters()])


@attack("recomputation", "a block goes through the model's children and counts in a dict of one", only=RERUN)
def count_on_a_child_of_the_model(t: Trial) -> None:
    def bump(model: Any) -> None:
        for child in model.children():
            if hasattr(child, "meter"):
                child.meter["seen"] += 1

    _rooted(t, bump, lambda model: model.head.meter["seen"])


@attack(
    "recomputation", "a block counts through views of a dict: its values, and one that may only be read", only=RERUN
)
def count_through_views_of_a_dict(t: Trial) -> None:
    own = {"seen": [0]}
    shown, values = types.MappingProxyType(own), {"seen": [0]}.values()

    def bump() -> None:
        shown["seen"][0] += 1
        for value in values:
            value[0] += 1

    _train(t, bump, lambda: (own["seen"][0], list(values)))


@attack("recomputation", "a block counts in an array of twenty thousand objects", only=RERUN)
def count_in_an_array_of_objects(t: Trial) -> None:
    seen = np.zeros(20_000, dtype=object)

    def bump() -> None:
        seen[12_345] += 1

    _train(t, bump, lambda: int(seen[12_345]))
