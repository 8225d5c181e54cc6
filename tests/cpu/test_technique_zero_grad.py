"""Gradients that are freed where they would be zeroed: the same training, also for a parameter that gets none in some steps."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from tests.cpu.optimizer_training import DEVICE, OPTIMIZERS, Tied, assert_same, choice, peak_bytes, traced, train

from tightfit.analysis.profile import Profile
from tightfit.devices.catalogue import find
from tightfit.techniques.lifetimes.zero_grad import ZeroGrad
from tightfit.techniques.session import Session


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_trains_bit_for_bit_alike(optimizer):
    plain = train(optimizer=optimizer, set_to_none=False, reload_at=2, max_norm=0.1)
    run = train(ZeroGrad(), optimizer=optimizer, set_to_none=False, reload_at=2, max_norm=0.1)
    assert_same(plain, run)
    assert all(p.grad is not None for p in plain.model.parameters() if p.requires_grad)
    assert all(not p.grad.source.held() for p in run.model.parameters() if p.requires_grad)


class Switching(torch.nn.Module):
    """Uses one of its two layers, by turns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor, turn: int) -> torch.Tensor:
        return self.layers[turn % 2](x)


def test_a_layer_that_is_replaced_is_not_kept():
    model = Switching()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    ZeroGrad().apply(Session(model=model, optimizers=[optimizer]), [choice("zero_grad", "gradients")])
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        model(torch.randn(3, 4), 0).sum().backward()
        optimizer.step()
    known = weakref.ref(model.layers[0].weight)
    model.layers[0] = torch.nn.Linear(4, 4)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    optimizer.state.clear()
    gc.collect()
    assert known() is None


@pytest.mark.parametrize("by_closure", [False, True])
@pytest.mark.parametrize("by_model", [False, True])
def test_a_parameter_without_gradient_is_updated_with_zeros_as_before(by_model, by_closure):
    def trained(technique: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Switching()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        if technique:
            ZeroGrad().apply(Session(model=model, optimizers=[optimizer]), [choice("zero_grad", "gradients")])
        for turn in range(6):

            def closure(turn: int = turn) -> torch.Tensor:
                (model if by_model else optimizer).zero_grad(set_to_none=False)
                loss = model(torch.randn(3, 4), turn).square().sum()
                loss.backward()
                return loss

            if by_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        return [p.detach() for p in model.parameters()]

    torch.testing.assert_close(trained(technique=True), trained(technique=False), rtol=0, atol=0)


class Plain(torch.optim.Optimizer):
    """Written by hand: its step takes no closure."""

    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 0.1, "decay": 0.1})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad + group["decay"] * p, alpha=-group["lr"])


class TakesTwo(Plain):
    """With a closure its step does something else."""

    @torch.no_grad()
    def step(self, closure=None) -> None:
        if closure is not None:
            raise AssertionError("the program hands no closure")
        super().step()


@pytest.mark.parametrize("kind", [Plain, TakesTwo])
def test_an_optimizer_of_the_programs_own_is_handed_no_closure(kind):
    def trained(technique: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Switching()
        optimizer = kind(model.parameters())
        if technique:
            ZeroGrad().apply(Session(model=model, optimizers=[optimizer]), [choice("zero_grad", "gradients")])
        for turn in range(4):
            optimizer.zero_grad(set_to_none=False)
            model(torch.randn(3, 4), turn).square().sum().backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    torch.testing.assert_close(trained(technique=True), trained(technique=False), rtol=0, atol=0)


def test_undone_it_zeroes_again_and_copies_are_their_own():
    model = Tied()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    session = Session(model=model, optimizers=[optimizer])
    ZeroGrad().apply(session, [choice("zero_grad", "gradients")])
    twin = copy.deepcopy(model)
    model(torch.arange(3)[None]).sum().backward()
    twin(torch.arange(3)[None]).sum().backward()
    twin.zero_grad(set_to_none=False)
    assert type(twin.table.weight.grad) is torch.Tensor and not twin.table.weight.grad.any()
    assert model.table.weight.grad is not None
    assert pickle.loads(pickle.dumps(model)).state_dict().keys() == model.state_dict().keys()
    session.undo()
    assert "zero_grad" not in vars(model)
    assert "zero_grad" not in vars(optimizer)
    assert not optimizer._optimizer_step_pre_hooks
    optimizer.zero_grad(set_to_none=False)
    assert not model.table.weight.grad.any()


def test_the_promised_saving_is_the_traced_one():
    plain = traced(set_to_none=0, batch_size=4096)
    (option,) = ZeroGrad().options(Profile(plain, find(DEVICE)))
    actual = traced(
        set_to_none=0,
        batch_size=4096,
        technique="tightfit.techniques.lifetimes.zero_grad:ZeroGrad",
        where="gradients",
    )
    saved = peak_bytes(plain) - peak_bytes(actual)
    assert saved > 20e6
    assert peak_bytes(plain) - peak_bytes(plain, [option]) == pytest.approx(saved, rel=ZeroGrad.tolerance)
    assert option.seconds < 0


def test_where_gradients_are_freed_already_there_is_nothing_to_do():
    assert ZeroGrad().options(Profile(traced(), find(DEVICE))) == []


def test_what_a_script_has_another_name_for_is_filled_where_it_is():
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ZeroGrad().apply(Session(model=model, optimizers=[optimizer]), [choice("zero_grad", "gradients")])
    model(torch.ones(2, 3)).sum().backward()
    kept, flat = model.weight.grad, model.bias.grad.view(-1)
    optimizer.zero_grad(set_to_none=False)
    assert model.weight.grad is kept
    assert not kept.any() and not flat.any()
