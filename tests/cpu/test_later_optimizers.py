"""Optimizers that a program makes when others have trained: a plan goes on without what they cannot have, and a first one is refused as ever."""

import functools
import gc
from collections.abc import Callable

import pytest
import torch
from tests.cpu.applied import Net, batch_of, choice, root
from torch import nn

from tightfit.errors import ApplyError, apply_error, forget_apply_errors
from tightfit.planner.plan import Choice
from tightfit.runtime.attach import Attachment

FUSED = choice("optimizer_kernel", "optimizer", kernel="fused")
IN_BACKWARD = choice("update_in_backward", "optimizer", kernel="same", clips=False)
BLOCK = choice("checkpointing", "Net.layers.0")
MAKES: dict[str, Callable[..., torch.optim.Optimizer]] = {"ASGD": torch.optim.ASGD, "LBFGS": torch.optim.LBFGS}


def _loss(model: Net, optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor:
    rows, classes = batch_of(step)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(rows), classes)
    loss.backward()
    return loss


def trained(
    make: Callable[..., torch.optim.Optimizer], *, later: bool = True, is_search: bool = False
) -> list[torch.Tensor]:
    """Weights after steps of Adam, of the other optimizer, and of Adam once more; a search has another model for each, and drops those before."""
    torch.manual_seed(0)
    model = optimizer = Net()
    for made in (torch.optim.Adam, make, torch.optim.Adam) if later else (make,):
        if is_search:
            del model, optimizer
            gc.collect()
            model = Net()
        optimizer = made(model.parameters(), lr=0.01)
        for step in range(2):
            optimizer.step(functools.partial(_loss, model, optimizer, step))
    return [p.detach().clone() for p in model.parameters()]


def planned(*choices: Choice, said: list[str]) -> Attachment:
    return Attachment(choices, planned=[root(Net())], tell=said.append)


@pytest.mark.parametrize(
    ("kind", "of_optimizer", "is_search"),
    [("ASGD", FUSED, False), ("LBFGS", IN_BACKWARD, False), ("ASGD", FUSED, True)],
)
def test_training_goes_on_without_what_a_later_optimizer_cannot_have(
    kind: str, of_optimizer: Choice, is_search: bool
) -> None:
    expected, said = trained(MAKES[kind], is_search=is_search), list[str]()
    forget_apply_errors()
    end = planned(BLOCK, of_optimizer, said=said).install()
    try:
        found = trained(MAKES[kind], is_search=is_search)
    finally:
        end()
    for one, other in zip(expected, found, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)
    assert sum("was made later" in line for line in said) == 1
    assert apply_error() is None


def test_a_first_optimizer_is_refused() -> None:
    end = planned(BLOCK, FUSED, said=[]).install()
    try:
        with pytest.raises(ApplyError, match="ASGD has no fused implementation"):
            trained(MAKES["ASGD"], later=False)
    finally:
        end()
        forget_apply_errors()


@pytest.mark.parametrize("is_built_anew", [False, True])
def test_training_goes_on_without_what_blocks_that_are_trained_by_now_cannot_have(is_built_anew: bool) -> None:
    settings = {"preceding": "", "following": "", "smallest_bytes": 1, "host_bytes": 1 << 14}
    streamed = [choice("weight_streaming", f"Net.layers.{number}", **settings) for number in (1, 2)]

    def unfrozen_later() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Net()
        model.layers[1:].requires_grad_(False)
        for _ in range(2):
            optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
            for step in range(2):
                optimizer.step(functools.partial(_loss, model, optimizer, step))
            if is_built_anew:
                before, model = model, Net()
                model.load_state_dict(before.state_dict())
            model.layers[1:].requires_grad_(True)
        return [p.detach().clone() for p in model.parameters()]

    expected, said = unfrozen_later(), list[str]()
    forget_apply_errors()
    end = planned(BLOCK, *streamed, said=said).install()
    try:
        found = unfrozen_later()
    finally:
        end()
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert sum("was made later" in line and "Net.layers.1" in line for line in said) == 1
    assert apply_error() is None


def _trained_with_a_smaller_one(num_blocks: int) -> list[torch.Tensor]:
    """The weights of two models of one class after two steps of each."""
    torch.manual_seed(0)
    models = Net(), Net(num_blocks=num_blocks)
    for model in models:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for step in range(2):
            optimizer.step(functools.partial(_loss, model, optimizer, step))
    return [p.detach().clone() for model in models for p in model.parameters()]


def test_a_second_smaller_model_of_the_class_has_only_what_is_for_blocks_that_it_has() -> None:
    settings = {"blocks": ["layers.0", "layers.2"], "smallest_bytes": 1, "host_bytes": 1 << 17}
    streamed = choice("trained_weight_streaming", "Net", **settings)

    expected = _trained_with_a_smaller_one(1)
    forget_apply_errors()
    end = Attachment([BLOCK, streamed], planned=[root(Net()), root(Net(num_blocks=1))]).install()
    try:
        found = _trained_with_a_smaller_one(1)
    finally:
        end()
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_a_later_model_of_a_size_that_the_plan_does_not_know_runs_unchanged() -> None:
    # A search over sizes, of which the trace saw the first.
    expected, said = _trained_with_a_smaller_one(2), list[str]()
    end = planned(BLOCK, IN_BACKWARD, said=said).install()
    try:
        found = _trained_with_a_smaller_one(2)
    finally:
        end()
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert any("knows of no Net of" in line for line in said)
