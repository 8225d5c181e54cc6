"""Adafactor takes an epsilon of None from the type of a group's first parameter: what updates each parameter apart refuses a group of several types."""

from typing import Any

import pytest
import torch
from torch import nn

from tightfit.errors import ApplyError
from tightfit.planner.plan import Choice
from tightfit.runtime.apply import apply_choices

TECHNIQUES: dict[str, dict[str, Any]] = {
    "optimizer_offload": {"host_bytes": 1 << 20},
    "update_in_backward": {"kernel": "same", "clips": False},
    "trained_weight_streaming": {"blocks": ["0", "2"], "smallest_bytes": 1, "host_bytes": 1 << 20},
}


def chosen(name: str) -> Choice:
    where = "Sequential" if name == "trained_weight_streaming" else "optimizer"
    return Choice(technique=name, where=where, settings=TECHNIQUES[name], saves_bytes=0, adds_seconds=0.0, exact=True)


@pytest.mark.parametrize("name", TECHNIQUES)
def test_an_optimizer_whose_epsilon_is_that_of_its_first_parameter_is_refused_where_types_are_mixed(name: str) -> None:
    model = nn.Sequential(nn.Linear(128, 128).bfloat16(), nn.ReLU(), nn.Linear(128, 64))
    where = "Sequential" if name == "trained_weight_streaming" else "optimizer"
    choice = Choice(technique=name, where=where, settings=TECHNIQUES[name], saves_bytes=0, adds_seconds=0.0, exact=True)
    with pytest.raises(ApplyError, match=r"eps=\(None, \.\.\.\)"):
        apply_choices([choice], model, [torch.optim.Adafactor(model.parameters())])
    # A number of its own, and types apart, are that of each.
    linears = [[*model[0].parameters()], [*model[2].parameters()]]
    for optimizer in (
        torch.optim.Adafactor(model.parameters(), eps=(1e-7, 1e-3)),
        torch.optim.Adafactor([{"params": of_one} for of_one in linears]),
    ):
        apply_choices([choice], model, [optimizer]).undo()


def test_a_type_that_joins_such_a_group_later_is_refused_before_the_update() -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64))
    optimizer = torch.optim.Adafactor(model.parameters())
    with apply_choices([chosen("optimizer_offload")], model, [optimizer]):
        model[2].bfloat16()
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        before = [p.clone() for p in model.parameters()]
        with pytest.raises(ApplyError, match="eps"):
            optimizer.step()
        assert all(map(torch.equal, before, model.parameters()))
