"""Programs that look at optimizer states, write to them, save and load them in inference mode: what they get is written to by later updates."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.cpu.training_loops import Optimizer
from torch import nn

from tightfit.planner.plan import Choice
from tightfit.runtime.apply import apply_choices

_DISK = {"tier": "disk", "disk_bytes": 1 << 20}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "host": ("optimizer_offload", {"host_bytes": 1 << 20, "least_elements": 1, "window_bytes": 1 << 12}),
    "disk": ("optimizer_offload", {"host_bytes": 1 << 20, "least_elements": 1, **_DISK}),
    "updated at the host": ("optimizer_offload", {"host_bytes": 1 << 20, "least_elements": 1, "executor": "host"}),
    "trained streaming, disk": (
        "trained_weight_streaming",
        {
            "blocks": ["0", "2"],
            "smallest_bytes": 1,
            "least_elements": 1,
            "host_bytes": 1 << 20,
            "window_bytes": 1 << 12,
            **_DISK,
        },
    ),
    "8 bits": ("low_bit_states", {"bits": 8}),
    "8 bits at the host": ("low_bit_offload", {"format": "8-bit", "host_bytes": 1 << 20, "window_bytes": 1 << 18}),
}


def states(optimizer: Optimizer) -> list[torch.Tensor]:
    return [v for own in optimizer.state.values() for v in own.values() if isinstance(v, torch.Tensor) and v.dim()]


def reads(_: nn.Module, optimizer: Optimizer) -> Any:
    return float(sum(each.double().square().sum() for each in states(optimizer)))


def writes(_: nn.Module, optimizer: Optimizer) -> Any:
    for each in states(optimizer):
        each.mul_(0.5)


def saves(_: nn.Module, optimizer: Optimizer) -> Any:
    saved = optimizer.state_dict()["state"]
    return [float(v.double().sum()) for own in saved.values() for v in own.values()]


def predicts(model: nn.Module, _: Optimizer) -> Any:
    return model(torch.ones(2, 128)).tolist()


@pytest.mark.parametrize("does", [reads, writes, saves, predicts])
@pytest.mark.parametrize("way", WAYS)
def test_the_next_steps_are_those_of_the_plain_run(way: str, does: Callable[[nn.Module, Optimizer], Any]) -> None:
    technique, settings = WAYS[way]
    where = "Sequential" if technique == "trained_weight_streaming" else "optimizer"
    is_exact = not technique.startswith("low_bit")
    choice = Choice(
        technique=technique, where=where, settings=settings, saves_bytes=0, adds_seconds=0.0, exact=is_exact
    )
    found = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=way == "updated at the host")
        session = apply_choices([choice], model, [optimizer]) if is_planned else None
        seen = []
        for seed in range(4):
            model(torch.randn(4, 128, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
            with torch.inference_mode():
                seen.append(does(model, optimizer))
            optimizer.step()
            optimizer.zero_grad()
        found.append((seen, list(model.parameters())))
        if session is not None:
            session.undo()
            assert not any(each.is_inference() for each in states(optimizer))
    if is_exact:
        assert found[0][0] == found[1][0] and all(map(torch.equal, found[0][1], found[1][1]))
    else:
        # Of a way of at most four times the rate.
        off = [float((a - b).detach().abs().mean()) for a, b in zip(found[0][1], found[1][1], strict=True)]
        assert max(off) < 0.005
