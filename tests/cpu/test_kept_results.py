"""What a selective checkpoint keeps between the two runs of a block: how long, for how many passes, and for which calls alone."""

import gc
import weakref
from typing import Any

import pytest
import torch
from tests.cpu.applied import choice
from torch import nn

from tightfit.errors import ApplyError
from tightfit.runtime.apply import apply_choices
from tightfit.techniques.recomputation.kept_results import GivesResults, KeepsResults, OtherRunError


class TwoTowers(nn.Module):
    """A block with two outputs that share nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> Any:
        """Both outputs."""
        first, second = x.unbind(1)
        return torch.tanh(self.layers[1](torch.tanh(self.layers[0](first)))), torch.tanh(self.layers[2](second))


def gradients(model: nn.Sequential, *, retain: bool) -> list[torch.Tensor]:
    """Those of one output, and then of the other."""
    x = torch.linspace(-1, 1, 24).reshape(3, 2, 4)
    first, second = model(x)
    one, two, other = (layer.weight for layer in model[0].layers)
    found = torch.autograd.grad(first.sum(), [one, two], retain_graph=retain)
    return [*found, *torch.autograd.grad(second.sum(), [other])]


@pytest.mark.parametrize("retain", [False, True])
def test_a_graph_can_be_gone_through_part_by_part(retain: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(TwoTowers())
    plain = gradients(model, retain=retain)
    session = apply_choices([choice("selective_checkpointing", "Sequential.0", keep=[0, 1, 2])], model, [])
    for _ in range(4):
        found = gradients(model, retain=retain)
        assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    session.undo()


def test_what_is_kept_goes_with_the_graph() -> None:
    first = KeepsResults(frozenset({0, 2}))
    weight = torch.randn(4, 4, requires_grad=True)
    with first:
        result = torch.mm(torch.mm(torch.mm(weight, weight), weight), weight)
    kept = [weakref.ref(each.value) for product in first.kept.values() for each in product.tensors()]
    assert len(kept) == 2
    # No circle through the graph, which only the garbage collector would find.
    gc.disable()
    try:
        del first, result
        assert [each() for each in kept] == [None, None]
    finally:
        gc.enable()


def test_a_result_is_given_to_the_call_that_it_was_kept_of_alone() -> None:
    weight = torch.randn(4, 4)
    first = KeepsResults(frozenset({1}))
    with first:
        torch.mm(weight, weight)
        kept = torch.mm(weight[:2], weight)
    with GivesResults(first):
        torch.mm(weight, weight)
        assert torch.mm(weight[:2], weight).data_ptr() == kept.data_ptr()
    with GivesResults(first):
        torch.mm(weight, weight)
        with pytest.raises(OtherRunError):
            torch.mm(weight, weight)


class Sometimes(nn.Module):
    """Leaves its first product out in a second run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layers, or the last one."""
        x = x if torch._C._current_graph_task_id() != -1 else torch.tanh(self.layers[0](x))
        return torch.tanh(self.layers[1](x))


def test_another_product_in_the_second_run_is_refused() -> None:
    model = nn.Sequential(Sometimes())
    apply_choices([choice("selective_checkpointing", "Sequential.0", keep=[0, 1])], model, [], check_steps=0)
    with pytest.raises(ApplyError, match=r"ran differently when it was recomputed; leave it out"):
        model(torch.randn(2, 4)).sum().backward()
