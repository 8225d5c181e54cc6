"""How many backward passes a trace shows before one optimizer step."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tightfit.analysis.gradient_readers import num_backwards_per_update
from tightfit.analysis.profile import Profile
from tightfit.devices.catalogue import find
from tightfit.fit import capture

_DEVICE = "RTX 4090"


def workload(kind: str = "plain") -> Iterator[torch.Tensor]:
    """Two layers with Adam; `by hand` a second model is updated between backward pass and step, `accumulates` two passes add up."""
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)).cuda()
    other = nn.Linear(32, 8).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    while True:
        for _ in range(2 if kind == "accumulates" else 1):
            hidden = model(torch.randn(16, 32, device="cuda"))
            loss = hidden.square().mean()
            loss.backward()
        if kind == "by hand":
            other(hidden.detach()).square().mean().backward()
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.sub_(0.1 * parameter.grad)
                    parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@pytest.mark.parametrize(("kind", "expected"), [("plain", 1), ("by hand", 1), ("accumulates", 2)])
def test_backward_passes_whose_gradients_are_gone_do_not_count(kind: str, expected: int) -> None:
    tape = capture(f"{__file__}:workload", device=_DEVICE, parameters=[f"kind={kind}"])
    assert num_backwards_per_update(Profile(tape, find(_DEVICE)).optimizer) == expected
