"""Views of weights that a program keeps while the weights are moved: right, or refused before anything is trained with other values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tightfit.engine.host_slab import HostSlab
from tightfit.errors import ApplyError
from tightfit.planner.plan import Choice
from tightfit.runtime.apply import apply_choices
from tightfit.techniques.session import Session


class Cached(nn.Linear):
    """Keeps what its first call has made of the weight."""

    view: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.view is None:
            self.view = self.weight.detach().t()
        return super().forward(x) + x @ self.view


def streamed(model: nn.Module, optimizer: torch.optim.Optimizer | None, technique: str, where: str) -> Session:
    settings = {"smallest_bytes": 1, "host_bytes": 1 << 16}
    if technique == "trained_weight_streaming":
        settings |= {"blocks": ["0", "1"]}
    choice = Choice(technique=technique, where=where, saves_bytes=0, adds_seconds=0.0, exact=True, settings=settings)
    return apply_choices([choice], model, [] if optimizer is None else [optimizer])


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("view_of", [nn.Linear, Cached])
def test_a_weight_that_is_cached_by_its_first_call_is_refused_before_the_first_update(view_of: type[nn.Linear]) -> None:
    model = nn.Sequential(view_of(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = [p.detach().clone() for p in model.parameters()]
    with streamed(model, optimizer, "trained_weight_streaming", "Sequential"):
        if view_of is nn.Linear:
            step(model, optimizer)
            return
        with pytest.raises(ApplyError, match="holds a view of a streamed weight"):
            step(model, optimizer)
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))


def test_a_frozen_weight_may_be_cached_until_it_is_written_to() -> None:
    model = nn.Sequential(Cached(8, 8), nn.Linear(8, 8)).requires_grad_(False)
    with streamed(model, None, "weight_streaming", "Sequential.0"), torch.no_grad():
        model(torch.randn(4, 8))
        model(torch.randn(4, 8))
        model[0].weight.add_(1.0)
        with pytest.raises(ApplyError, match="does not see later writes"):
            model(torch.randn(4, 8))


@pytest.mark.parametrize("view_of", [torch.Tensor.detach, lambda p: p.detach().t(), lambda p: p.detach().numpy()])
def test_a_view_that_was_taken_between_two_steps_is_still_one_after_the_plan_was_undone(
    view_of: Callable[[torch.Tensor], Any],
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    session = streamed(model, optimizer, "trained_weight_streaming", "Sequential")
    step(model, optimizer)
    view = view_of(model[0].weight)
    step(model, optimizer)
    model[0].weight.grad.zero_()
    session.undo()
    del session
    step(model, optimizer)
    assert abs(float(view.sum()) - float(model[0].weight.detach().sum())) < 1e-6
    with torch.no_grad():
        view[:] = 0.0
    assert not model[0].weight.any()


def test_a_weight_without_views_is_in_a_storage_of_its_own_after_the_plan_was_undone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with streamed(model, optimizer, "trained_weight_streaming", "Sequential"):
        step(model, optimizer)
    assert all(p.untyped_storage().resizable() for p in model.parameters())


def test_gradients_that_the_program_has_views_of_return_to_where_they_lay() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session = streamed(model, optimizer, "trained_weight_streaming", "Sequential")
    step(model, optimizer)
    view = model[0].weight.grad.view(-1)
    model(torch.randn(4, 8)).square().mean().backward()
    session.undo()
    view.zero_()
    assert not model[0].weight.grad.any()


def test_a_part_of_the_slab_is_not_handed_out_again_while_anything_lies_in_its_memory() -> None:
    slab = HostSlab(512, torch.device("cpu"))
    part = slab.take(512)
    view = part.with_storage()[:8]
    del part
    assert slab.free_bytes == 0
    del view
    assert slab.free_bytes == 512
