"""A plan that is put on in the first call of a model, which is one of `torch.func`: what the plan makes then is there in later calls."""

import pytest
import torch
from tests.attacks.models import Net, sgd, tokens
from tests.attacks.places import choice
from torch.func import functional_call, grad

from tightfit.runtime.apply import apply_choices
from tightfit.techniques.session import Session

TIERS = {"host": {"host_bytes": 1 << 20}, "disk": {"host_bytes": 1 << 20, "tier": "disk", "disk_bytes": 1 << 20}}


def _losses(tier: str | None) -> list[float]:
    torch.manual_seed(0)
    model = Net()
    optimizer = sgd(model)
    sessions: list[Session] = []
    settings = {"following": "Net.blocks.1", "smallest_bytes": 1, **TIERS.get(tier or "", {})}

    def loss_of(parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if tier and not sessions:
            chosen = [choice("activation_offload", "Net.blocks.0", **settings)]
            sessions.append(apply_choices(chosen, model, [optimizer]))
        return functional_call(model, parameters, (x, y))

    losses = []
    for step in range(4):
        found = grad(loss_of)({n: p.detach() for n, p in model.named_parameters()}, *tokens(step))
        losses.append(float(found["head.weight"].sum()))
        loss = model(*tokens(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for session in sessions:
        session.undo()
    return losses


@pytest.mark.parametrize("tier", TIERS)
def test_the_memory_that_a_plan_takes_is_none_of_a_transforms(tier: str) -> None:
    assert _losses(tier) == _losses(None)
