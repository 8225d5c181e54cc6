"""Torch's fused implementations for the host: which are right in which type, and that no plan updates by one that is not."""

from typing import Any

import pytest
import torch
from tests.conformance.large_models import Decoder
from tests.cpu.training_loops import train
from torch import nn

from tightfit.errors import ApplyError
from tightfit.planner.plan import Choice
from tightfit.runtime.apply import apply_choices
from tightfit.techniques.optimizer.updates.optimizer_kernels import UPDATED_ON_HOST, goes_wrong_at_host

# Of their type's precision, over three steps of numbers about one.
_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.05}


@pytest.mark.parametrize("kind", sorted(UPDATED_ON_HOST))
@pytest.mark.parametrize("dtype", _CLOSE)
def test_each_is_right_but_for_what_is_known_to_go_wrong(kind: str, dtype: torch.dtype) -> None:
    others = {"momentum": 0.9} if kind == "SGD" else {}
    found = []
    for flags in ({"fused": True}, {"foreach": False}):
        chance = torch.Generator().manual_seed(0)
        weight = nn.Parameter(torch.randn(40, generator=chance).to(dtype))
        optimizer = getattr(torch.optim, kind)([weight], lr=0.05, **flags, **others)
        for _ in range(3):
            weight.grad = torch.randn(40, generator=chance).to(dtype)
            optimizer.step()
        found.append(weight.detach().double())
    difference = float((found[0] - found[1]).abs().max())
    # Where torch mends it, `goes_wrong_at_host` may go.
    assert (not difference < _CLOSE[dtype]) == goes_wrong_at_host(optimizer, dtype)


HOST: dict[str, dict[str, Any]] = {
    "optimizer_offload": {"host_bytes": 1 << 20, "least_elements": 1, "executor": "host"},
    "trained_weight_streaming": {
        "blocks": ["blocks.0", "blocks.1"],
        "smallest_bytes": 1,
        "host_bytes": 1 << 18,
        "kernel": "fused",
    },
}


def chosen(name: str) -> Choice:
    where = "Decoder" if name == "trained_weight_streaming" else "optimizer"
    return Choice(technique=name, where=where, settings=HOST[name], saves_bytes=0, adds_seconds=0.0, exact=True)


def small() -> Decoder:
    torch.manual_seed(0)
    return Decoder(50, 16, 2, 2).bfloat16()


@pytest.mark.parametrize("name", HOST)
def test_half_precision_with_momentum_is_updated_at_the_host_as_without_it(name: str) -> None:
    plain, model = small(), small()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, model)]
    with apply_choices([chosen(name)], model, optimizers[1:]):
        for seed in range(3):
            losses = [train(each, optimizer, seed) for each, optimizer in zip((plain, model), optimizers, strict=True)]
            assert torch.equal(*losses)
    assert all(map(torch.equal, plain.parameters(), model.parameters()))


def test_a_programs_own_fused_optimizer_is_refused_where_it_would_update_at_the_host() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    with pytest.raises(ApplyError, match="fused SGD is incorrect on the CPU"):
        apply_choices([chosen("trained_weight_streaming")], model, [optimizer])
    kernel = Choice(
        technique="optimizer_kernel",
        where="optimizer",
        settings={"kernel": "fused"},
        saves_bytes=0,
        adds_seconds=0.0,
        exact=True,
    )
    with pytest.raises(ApplyError, match="is incorrect on the CPU in"):
        apply_choices([kernel], model, [torch.optim.SGD(model.parameters(), lr=0.1)])
