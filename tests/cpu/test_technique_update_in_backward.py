"""Updates within the backward pass: the same training bit for bit, no gradient left, and errors where gradients would have been wanted."""

import copy
import gc
import weakref

import pytest
import torch
from tests.cpu.optimizer_training import DEVICE, OPTIMIZERS, Tied, assert_same, choice, peak_bytes, traced, train
from torch.utils.checkpoint import checkpoint

from tightfit.devices.catalogue import find
from tightfit.errors import ApplyError
from tightfit.techniques.lazy_tensor import LazyTensor
from tightfit.techniques.session import Session
from tightfit.techniques.update_in_backward import UpdateInBackward

NAME = "tightfit.techniques.update_in_backward:UpdateInBackward"
PLAIN = {"kernel": "same", "clips": False}


def hooked(model, optimizer, **settings):
    session = Session(model=model, optimizers=[optimizer])
    UpdateInBackward().apply(session, [choice("update_in_backward", **(PLAIN | settings))])
    return session


@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_trains_bit_for_bit_alike(optimizer, one_pass):
    plain = train(optimizer=optimizer, reload_at=2)
    given = PLAIN | {"one_pass": one_pass}
    run = train(UpdateInBackward(), given, optimizer=optimizer, reload_at=2, watches_gradients=False)
    assert_same(plain, run)
    torch.testing.assert_close(run.optimizer.state_dict(), plain.optimizer.state_dict(), rtol=0, atol=0)
    assert run.session.statistics["parameters updated in backward"] == 6 * len(plain.gradients[0])
    assert not run.session.notes


def test_gradients_that_a_hook_sees_are_kept_and_the_run_is_told():
    plain = train()
    run = train(UpdateInBackward(), PLAIN)
    assert_same(plain, run)
    assert run.gradients[0].keys() == plain.gradients[0].keys()
    assert run.session.statistics["backward passes with all gradients kept"] == 6
    assert "hook on its gradient" in run.session.notes[0]


def test_the_fused_kernel_differs_by_rounding_only():
    run = train(UpdateInBackward(), PLAIN | {"kernel": "fused"}, reload_at=2, watches_gradients=False)
    assert_same(train(reload_at=2), run, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("max_norm", [0.05, 1e9])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_clipping_by_norm_is_kept_by_a_second_pass(optimizer, max_norm):
    plain = train(optimizer=optimizer, max_norm=max_norm, reload_at=2)
    given = PLAIN | {"clips": True}
    run = train(UpdateInBackward(), given, optimizer=optimizer, max_norm=max_norm, reload_at=2, watches_gradients=False)
    assert_same(plain, run)
    assert run.session.statistics["parameters updated in backward"] == 6 * len(plain.gradients[0])


def test_the_norm_that_clipping_returns_is_that_of_all_gradients():
    model = Tied().eval()
    plain = copy.deepcopy(model)
    hooked(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), clips=True)
    tokens = torch.arange(8)[None]
    norms = []
    for each in (plain, model):
        each(tokens).square().sum().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0))
    torch.testing.assert_close(norms[1], norms[0])
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(isinstance(gradient, LazyTensor) and not gradient.source.held() for gradient in gradients)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("clips", [True, False])
def test_it_works_in_a_checkpointed_backward_pass(reentrant, clips):
    def steps(technique: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Dropout(0.2)) for _ in range(3))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        if technique:
            hooked(model, optimizer, clips=clips)
        for _ in range(5):
            hidden = torch.randn(4, 6, requires_grad=True)
            for block in model:
                hidden = checkpoint(block, hidden, use_reentrant=reentrant)
            hidden.square().mean().backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    torch.testing.assert_close(
        steps(technique=True), steps(technique=False), rtol=1e-5 if clips else 0, atol=1e-6 if clips else 0
    )


def stepped(model, optimizer):
    """One step, whose gradients are not cleared."""
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def test_gradients_that_are_used_up_are_not_read_or_used_again():
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = hooked(model, optimizer)
    stepped(model, optimizer)
    norms = [p.grad.norm() for p in model.parameters()]
    assert torch.equal(torch.stack(norms), torch.tensor([12.0, 12.0]).sqrt() * torch.tensor([3.0**0.5, 1.0]))
    with pytest.raises(ApplyError, match="a gradient is read after the update"):
        model.weight.grad.add_(1.0)
    with pytest.raises(ApplyError, match="a gradient is read after the update"):
        optimizer.step()  # a script that has swallowed the first error does not go on
    session.undo()
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 0


def test_what_changes_between_an_update_in_one_pass_and_its_step_is_refused():
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooked(model, optimizer, one_pass=True)
    for _ in range(2):
        stepped(model, optimizer)
        optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.param_groups[0]["lr"] = 0.2
    with pytest.raises(ApplyError, match="changed between"):
        optimizer.step()


def test_undone_nothing_of_it_is_left():
    before = torch.autograd._engine_run_backward, torch.Tensor.register_hook, torch.Tensor.retain_grad
    run = train(UpdateInBackward(), PLAIN | {"clips": True}, max_norm=1.0, watches_gradients=False)
    assert torch.autograd._engine_run_backward is not before[0]
    run.session.undo()
    assert (torch.autograd._engine_run_backward, torch.Tensor.register_hook, torch.Tensor.retain_grad) == before
    assert not any(p._post_accumulate_grad_hooks for p in run.model.parameters())
    assert not run.optimizer._optimizer_step_pre_hooks
    assert run.model.state_dict().keys() == Tied().state_dict().keys()


def test_what_a_program_drops_is_freed_though_nothing_was_undone():
    model = Tied()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    hooked(model, optimizer)
    model(torch.arange(8)[None]).square().sum().backward()
    left = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert [each() for each in left] == [None, None]


def test_a_copy_of_the_model_has_no_hooks():
    model = Tied()
    hooked(model, torch.optim.Adam([p for p in model.parameters() if p.requires_grad]))
    twin = copy.deepcopy(model)
    twin(torch.arange(5)[None]).sum().backward()
    assert twin.table.weight.grad is not None


class Mine(torch.optim.Optimizer):
    """An optimizer that nobody knows."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        return None


def test_optimizers_that_look_at_all_parameters_together_are_refused():
    model = torch.nn.Linear(2, 2)

    for optimizer in (torch.optim.LBFGS(model.parameters()), Mine(model.parameters())):
        with pytest.raises(ApplyError, match="not known to update each parameter by itself"):
            hooked(model, optimizer)


@pytest.mark.parametrize(("max_norm", "kernel"), [(0.0, "same"), (1.0, "fused")])
def test_the_promised_saving_is_the_traced_one(max_norm, kernel):
    plain = traced(max_norm=max_norm)
    options = {option.settings["kernel"]: option for option in UpdateInBackward().options(plain, find(DEVICE))}
    assert set(options) == {"same", "fused"}
    assert options["fused"].seconds < options["same"].seconds
    option = options[kernel]
    assert option.settings["clips"] is bool(max_norm)
    actual = traced(
        technique=NAME, settings=f"kernel:{kernel}+clips:{bool(max_norm)}+one_pass:{not max_norm}", max_norm=max_norm
    )
    saved = peak_bytes(plain) - peak_bytes(actual)
    assert saved > 30e6
    assert peak_bytes(plain) - peak_bytes(plain, [option]) == pytest.approx(saved, rel=UpdateInBackward.tolerance)


def test_nothing_is_offered_in_one_pass_where_parameters_are_read_before_the_step():
    for averages, expected in ((0, {True}), (1, {False}), (8, set())):
        options = UpdateInBackward().options(traced(averages=averages), find(DEVICE))
        assert {option.settings["one_pass"] for option in options} == expected
