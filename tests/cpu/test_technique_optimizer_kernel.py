"""The three implementations of an optimizer: same training, other temporaries; what options promise is what a traced run holds."""

import copy
import pickle

import pytest
import torch
from tests.cpu.optimizer_training import DEVICE, assert_same, choice, peak_bytes, traced, train

from tightfit.analysis.profile import Profile
from tightfit.devices.catalogue import find
from tightfit.errors import ApplyError
from tightfit.runtime.apply import apply_choices
from tightfit.techniques.optimizer.optimizer_kernel import OptimizerKernel
from tightfit.techniques.session import Session

NAME = "tightfit.techniques.optimizer.optimizer_kernel:OptimizerKernel"


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd", "adagrad"])
def test_foreach_and_for_loop_train_bit_for_bit_alike(optimizer):
    loop = train(OptimizerKernel(), {"kernel": "for-loop"}, optimizer=optimizer)
    foreach = train(OptimizerKernel(), {"kernel": "foreach"}, optimizer=optimizer)
    assert_same(train(optimizer=optimizer), loop)
    assert_same(loop, foreach)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd", "adagrad"])
def test_the_fused_kernel_differs_by_rounding_only(optimizer):
    fused = train(OptimizerKernel(), {"kernel": "fused"}, optimizer=optimizer, reload_at=2)
    assert_same(train(optimizer=optimizer, reload_at=2), fused, rtol=1e-4, atol=1e-5)


def test_the_flags_and_a_checkpoint_are_those_of_a_plain_run():
    plain = train()
    run = train(OptimizerKernel(), {"kernel": "fused"}, reload_at=2)
    assert run.optimizer.param_groups[0]["fused"] is True  # loading a checkpoint has not taken it away
    saved = run.optimizer.state_dict()
    assert saved["param_groups"] == plain.optimizer.state_dict()["param_groups"]
    assert saved["state"].keys() == plain.optimizer.state_dict()["state"].keys()
    run.session.undo()
    assert run.optimizer.param_groups[0]["fused"] is plain.optimizer.param_groups[0]["fused"]
    assert run.optimizer.defaults == plain.optimizer.defaults
    assert not run.optimizer._optimizer_state_dict_post_hooks
    assert not run.optimizer._optimizer_load_state_dict_post_hooks


def test_an_optimizer_that_steps_by_another_one_and_has_its_groups_saves_what_a_plain_run_does():
    class Around(torch.optim.Optimizer):
        """As SAM is written."""

        def __init__(self, parameters):
            super().__init__(parameters, {})
            self.base = torch.optim.Adam(self.param_groups)
            self.param_groups = self.base.param_groups
            self.defaults |= self.base.defaults

        def step(self):
            self.base.step()

    model = torch.nn.Linear(3, 3)
    around = Around(model.parameters())
    plain = [copy.deepcopy(each.state_dict()["param_groups"]) for each in (around, around.base)]
    session = Session(model=model, optimizers=[around.base, around])
    OptimizerKernel().apply(session, [choice("optimizer_kernel", kernel="fused")])
    model(torch.ones(3)).sum().backward()
    around.step()
    assert around.base.param_groups[0]["fused"] is True
    assert [each.state_dict()["param_groups"] for each in (around, around.base)] == plain
    session.undo()
    assert around.param_groups[0]["fused"] is plain[0][0]["fused"]


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_an_optimizer_of_two_models_saves_what_a_plain_run_does(order):
    block = torch.nn.Linear(3, 3)
    optimizer = torch.optim.Adam(block.parameters())
    plain = copy.deepcopy(optimizer.state_dict()["param_groups"])
    sessions = [Session(model=model, optimizers=[optimizer]) for model in (block, torch.nn.Sequential(block))]
    for session, kernel in zip(sessions, ("fused", "for-loop"), strict=True):
        OptimizerKernel().apply(session, [choice("optimizer_kernel", kernel=kernel)])
    assert optimizer.state_dict()["param_groups"] == plain
    for number in order:
        sessions[number].undo()
        assert optimizer.state_dict()["param_groups"] == plain
    assert optimizer.param_groups[0]["fused"] is plain[0]["fused"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_copies_have_the_flags_of_a_plain_run(copied):
    plain = train().optimizer
    optimizer = train(OptimizerKernel(), {"kernel": "fused"}).optimizer
    other = copied(optimizer)
    assert optimizer.param_groups[0]["fused"] is True
    assert other.defaults == plain.defaults and type(other.state) is type(plain.state)
    assert [{**group, "params": 0} for group in other.param_groups] == [
        {**group, "params": 0} for group in plain.param_groups
    ]
    other.step()


def test_a_run_goes_on_as_before_when_it_is_undone():
    plain, run = train(num_steps=5), train(OptimizerKernel(), {"kernel": "for-loop"}, num_steps=5)
    run.session.undo()
    for trained in (plain, run):
        for parameter in trained.optimizer.param_groups[0]["params"]:
            parameter.grad = torch.full_like(parameter, 0.5)
        trained.optimizer.step()
    torch.testing.assert_close(run.parameters, plain.parameters, rtol=0, atol=0)


def test_what_cannot_run_an_implementation_is_left_as_it_is():
    weight = torch.nn.Linear(3, 3)
    for optimizer, reason in (
        (torch.optim.NAdam(weight.parameters()), "NAdam has no fused"),
        (torch.optim.LBFGS(weight.parameters()), "LBFGS has no fused"),
        (torch.optim.Adam(weight.parameters(), differentiable=True), "differentiable"),
    ):
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(ApplyError, match=reason):
            OptimizerKernel().apply(
                Session(model=weight, optimizers=[optimizer]), [choice("optimizer_kernel", kernel="fused")]
            )
        assert optimizer.state_dict() == before
    table = torch.nn.Embedding(3, 3, sparse=True)
    with pytest.raises(ApplyError, match="sparse"):
        OptimizerKernel().apply(
            Session(model=table, optimizers=[torch.optim.SGD(table.parameters(), lr=0.1)]),
            [choice("optimizer_kernel", kernel="fused")],
        )


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_promised_saving_is_the_traced_one(optimizer):
    plain = traced(optimizer=optimizer)
    options = {option.settings["kernel"]: option for option in OptimizerKernel().options(Profile(plain, find(DEVICE)))}
    assert set(options) == {"fused", "for-loop"}
    assert options["fused"].seconds < 0 < options["for-loop"].seconds
    for kernel, option in options.items():
        actual = traced(optimizer=optimizer, technique=NAME, settings=f"kernel:{kernel}")
        assert peak_bytes(plain, [option]) == pytest.approx(peak_bytes(actual), rel=0.01)


def test_what_runs_fused_has_nothing_to_gain():
    fused = traced(technique=NAME, settings="kernel:fused")
    assert OptimizerKernel().options(Profile(fused, find(DEVICE))) == []


@pytest.mark.parametrize("dampening", [0.0, 0.1])
def test_a_parameter_whose_first_gradient_comes_later_is_trained_on(dampening):
    def trained(kernel):
        torch.manual_seed(0)
        model = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(3)])
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.01, dampening=dampening)
        session = (
            None if kernel is None else apply_choices([choice("optimizer_kernel", kernel=kernel)], model, [optimizer])
        )
        for step in range(6):
            x = torch.ones(2, 4)
            for layer in list(model)[: 1 + step // 2]:
                x = layer(x).tanh()
            x.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        flags = [group["fused"] for group in optimizer.param_groups]
        if session is not None:
            session.undo()
        return [p.detach().clone() for p in model.parameters()], flags

    (plain, _), (fused, flags) = trained(None), trained("fused")
    assert flags == [True]
    for one, other in zip(plain, fused, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def _in_columns(p):
    return torch.nn.Parameter(p.detach().t().contiguous().t())


def _with_gaps(p):
    return torch.nn.Parameter(p.detach().repeat_interleave(2, 1)[:, ::2])


@pytest.mark.parametrize("technique", ["optimizer_kernel", "update_in_backward", "low_bit_states"])
@pytest.mark.parametrize("laid", [_in_columns, _with_gaps, None])
def test_elements_in_other_orders_are_updated_with_their_own_gradients(laid, technique):
    """Torch's fused kernels go through memory, and update other elements where gradients or states lie otherwise."""
    settings = {
        "optimizer_kernel": {"kernel": "fused"},
        "update_in_backward": {"kernel": "fused", "clips": False},
        "low_bit_states": {"bits": 8, "kernel": "fused"},
    }[technique]

    is_fused = technique == "low_bit_states" and laid is _in_columns

    def trained(choices):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.Linear(96, 64))
        if laid is not None:
            for layer in (model[0], model[2]):
                layer.weight = laid(layer.weight)
        # With states of ours, the program's own fused kernel goes through them as well.
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=is_fused)
        session = apply_choices(choices, model, [optimizer]) if choices else None
        for step in range(6):
            if laid is None and step == 3:
                for layer in (model[0], model[2]):
                    layer.weight.data = layer.weight.data.t().contiguous().t()
            model(torch.randn(16, 64)).sub(1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights = [p.detach().clone() for p in model.parameters()]
        if session is not None:
            session.undo()
        return weights

    plain, found = trained(()), trained([choice(technique, **settings)])
    tolerance = 2e-2 if technique == "low_bit_states" else 1e-5
    for one, other in zip(plain, found, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_states_that_are_in_another_precision_than_the_weight_are_used_as_they_are():
    def trained(kernel):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        session = apply_choices([choice("optimizer_kernel", kernel=kernel)] if kernel else [], model, [optimizer])
        for step in range(5):
            if step == 3:
                model.float()
            model(torch.randn(4, 8).to(model.weight.dtype)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        session.undo()
        return [p.detach().clone() for p in model.parameters()]

    for one, other in zip(trained(None), trained("fused"), strict=True):
        torch.testing.assert_close(one, other)
