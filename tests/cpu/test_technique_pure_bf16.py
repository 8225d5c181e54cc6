"""Everything in bfloat16 but the states: updates below its resolution are kept, and undone all is float32 again."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cpu.optimizer_training import DEVICE, OPTIMIZERS, Tied, choice, peak_bytes, traced, train

from tightfit.analysis.profile import Profile
from tightfit.devices.catalogue import find
from tightfit.errors import ApplyError
from tightfit.techniques.precision.pure_bf16 import PureBf16
from tightfit.techniques.precision.stochastic_rounding import round_stochastically
from tightfit.techniques.session import Session

NAME = "tightfit.techniques.precision.pure_bf16:PureBf16"


@given(st.floats(width=32, allow_nan=False))
@settings(max_examples=200)
def test_a_number_is_rounded_to_one_of_its_neighbours(number):
    generator = torch.Generator().manual_seed(1)
    value = torch.full((8,), number)
    rounded = round_stochastically(value, generator)
    toward_zero = (value.view(torch.int32) & -(1 << 16)).view(torch.float32)
    away = ((value.view(torch.int32) & -(1 << 16)) + (1 << 16)).view(torch.float32)
    assert ((rounded.float() == toward_zero) | (rounded.float() == away)).all()
    if number == rounded[0].double().item():
        assert (rounded.float() == value).all()


@pytest.mark.parametrize("number", [1.001, -0.3, 3e-30, 1234.5])
def test_rounding_is_right_on_average(number):
    value = torch.full((200_000,), number)
    rounded = round_stochastically(value, torch.Generator().manual_seed(0)).double()
    spacing = (rounded.max() - rounded.min()).item()
    assert abs(rounded.mean().item() - value[0].double().item()) < 0.01 * spacing


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1, 0x7F800000, -0x00800000])
def test_what_is_no_finite_number_stays_what_it_is(bits):
    value = torch.full((64,), bits, dtype=torch.int32).view(torch.float32)
    rounded = round_stochastically(value, torch.Generator().manual_seed(0))
    torch.testing.assert_close(rounded.float(), value, equal_nan=True)


@pytest.mark.parametrize("rounding", ["stochastic", "compensated"])
def test_updates_below_the_resolution_are_not_lost(rounding):
    model = torch.nn.Linear(64, 64, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    session = Session(model=model, optimizers=[optimizer])
    PureBf16().apply(session, [choice("pure_bf16", "precision", rounding=rounding)])
    assert model.weight.dtype == torch.bfloat16
    for _ in range(100):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    session.undo()
    # Plain bfloat16 would still be 1: the step of 1e-4 is a fortieth of its resolution.
    assert model.weight.dtype == torch.float32
    assert model.weight.mean().item() == pytest.approx(0.99, abs=3e-4)


@pytest.mark.parametrize("rounding", ["stochastic", "compensated"])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_weights_that_are_loaded_after_a_run_has_diverged_are_trained_on(rounding, wrong):
    model = torch.nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    PureBf16().apply(
        Session(model=model, optimizers=[optimizer]), [choice("pure_bf16", "precision", rounding=rounding)]
    )
    good = copy.deepcopy(model.state_dict())
    for gradient in (wrong, 1.0):
        model.weight.grad = torch.full_like(model.weight, gradient)
        optimizer.step()
        assert bool(model.weight.isfinite().all()) == (gradient == 1.0)
        model.load_state_dict(good)


@pytest.mark.parametrize("rounding", ["stochastic", "compensated"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_trains_near_the_plain_run(optimizer, rounding):
    plain = train(optimizer=optimizer, reload_at=2, max_norm=1.0)
    run = train(PureBf16(), {"rounding": rounding}, optimizer=optimizer, reload_at=2, max_norm=1.0, where="precision")
    torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(plain.losses), rtol=0.05, atol=0)
    assert {p.dtype for p in run.parameters.values()} == {torch.bfloat16}
    for state in run.optimizer.state.values():
        assert all(v.dtype == torch.float32 for v in state.values() if isinstance(v, torch.Tensor))
    assert run.optimizer.state_dict()["state"].keys() == plain.optimizer.state_dict()["state"].keys()


def test_the_random_numbers_of_the_script_stay_what_they_were():
    def after(technique: PureBf16 | None) -> torch.Tensor:
        train(technique, {"rounding": "stochastic"}, num_steps=2, where="precision")
        return torch.rand(3)

    torch.testing.assert_close(after(PureBf16()), after(None), rtol=0, atol=0)


def test_undone_everything_is_as_it_was_and_a_copy_works():
    run = train(PureBf16(), {"rounding": "compensated"}, num_steps=3, where="precision")
    twin = copy.deepcopy(run.model)
    assert twin(torch.arange(4)[None]).dtype == torch.float32
    run.session.undo()
    assert {v.dtype for v in run.model.state_dict().values()} == {torch.float32}
    assert "forward" not in vars(run.model)
    for hooks in ("step_pre", "step_post", "load_state_dict_pre", "load_state_dict_post"):
        assert not getattr(run.optimizer, f"_optimizer_{hooks}_hooks")
    run.model(torch.arange(4)[None]).sum().backward()
    run.optimizer.step()
    assert run.model.state_dict().keys() == Tied().state_dict().keys()


def test_states_that_were_made_in_bfloat16_are_widened():
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        if not session._undo:  # within the first step, as a trainer that steps with a closure begins
            PureBf16().apply(session, [choice("pure_bf16", "precision", rounding="stochastic")])
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss

    session = Session(model=model, optimizers=[optimizer])
    losses = [optimizer.step(closure).item() for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert optimizer.state[model.weight]["exp_avg"].dtype == torch.float32


def test_a_closure_is_called_before_the_update():
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    PureBf16().apply(
        Session(model=model, optimizers=[optimizer]), [choice("pure_bf16", "precision", rounding="stochastic")]
    )
    before = model.weight.detach().clone()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) is not None
    assert (model.weight != before).all()


def test_a_model_without_float32_is_refused():
    model = torch.nn.Linear(2, 2).double()
    with pytest.raises(ApplyError, match="no float32 parameter"):
        PureBf16().apply(
            Session(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)]),
            [choice("pure_bf16", "precision", rounding="stochastic")],
        )


@pytest.mark.parametrize("is_part", [False, True])
@pytest.mark.parametrize(
    "read", [lambda x: x.detach().numpy().sum().item(), lambda x: x.detach().quantile(0.5)], ids=["numpy", "quantile"]
)
def test_an_operator_that_knows_no_bfloat16_is_refused_in_the_forward(read, is_part):
    class Reading(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * read(x)

    model = torch.nn.Sequential(Reading(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    PureBf16().apply(
        Session(model=model, optimizers=[optimizer]), [choice("pure_bf16", "precision", rounding="stochastic")]
    )
    with pytest.raises(
        ApplyError, match=r"^the model does not run in bfloat16 \(.*\); leave pure_bf16 out of the plan$"
    ):
        (model[0] if is_part else model)(torch.ones(2, 3))


@pytest.mark.parametrize(("batch_size", "rounding"), [(64, "compensated"), (8192, "stochastic")])
def test_the_promised_saving_is_near_the_traced_one(batch_size, rounding):
    plain = traced(batch_size=batch_size)
    (option,) = (o for o in PureBf16().options(Profile(plain, find(DEVICE))) if o.settings["rounding"] == rounding)
    actual = traced(batch_size=batch_size, technique=NAME, settings=f"rounding:{rounding}", where="precision")
    saved = peak_bytes(plain) - peak_bytes(actual)
    assert saved > 20e6
    assert peak_bytes(plain) - peak_bytes(plain, [option]) == pytest.approx(saved, rel=PureBf16.tolerance)
    assert option.needs_new_trace and not option.exact
