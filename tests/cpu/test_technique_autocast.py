"""bfloat16 products around an unmodified model: what the loss sees is float32, training stays near, and activations are smaller."""

import copy

import pytest
import torch
from tests.cpu.optimizer_training import DEVICE, Tied, choice, peak_bytes, traced, train

from tightfit.analysis.profile import Profile
from tightfit.devices.catalogue import find
from tightfit.errors import ApplyError
from tightfit.techniques.precision.autocast import Autocast
from tightfit.techniques.session import Session

NAME = "tightfit.techniques.precision.autocast:Autocast"


def test_it_trains_near_the_plain_run_and_leaves_float32_behind():
    plain, run = train(), train(Autocast(), where="precision")
    torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(plain.losses), rtol=0.02, atol=0)
    assert run.losses != plain.losses
    assert {p.dtype for p in run.parameters.values()} == {torch.float32}
    assert all(g.dtype == torch.float32 for g in run.gradients[-1].values())


def test_products_are_in_bfloat16_and_results_in_float32():
    model = Tied()
    kinds = []
    model.blocks[0].register_forward_hook(lambda *given: kinds.append(given[2].dtype))
    session = Session(model=model, optimizers=[])
    Autocast().apply(session, [choice("autocast", "precision")])
    twin = copy.deepcopy(model)
    assert model(torch.arange(4)[None]).dtype == torch.float32
    assert twin(torch.arange(4)[None]).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.float16):
        assert model(torch.arange(4)[None]).dtype == torch.float16  # a script's own choice stands
    session.undo()
    model(torch.arange(4)[None])
    assert kinds == [torch.bfloat16, torch.bfloat16, torch.float16, torch.float32]
    assert "forward" not in vars(model)


def test_a_model_without_numbers_is_refused():
    with pytest.raises(ApplyError, match="no floating-point parameter"):
        Autocast().apply(Session(model=torch.nn.Identity(), optimizers=[]), [choice("autocast", "precision")])


def test_the_promised_saving_is_near_the_traced_one():
    plain = traced(batch_size=8192)
    (option,) = Autocast().options(Profile(plain, find(DEVICE)))
    actual = traced(batch_size=8192, technique=NAME, where="precision")
    saved = peak_bytes(plain) - peak_bytes(actual)
    assert saved > 50e6
    assert peak_bytes(plain) - peak_bytes(plain, [option]) == pytest.approx(saved, rel=Autocast.tolerance)
    assert option.seconds < 0
    assert option.needs_new_trace and not option.exact
    assert Autocast().options(Profile(actual, find(DEVICE))) == []


def test_a_card_without_bfloat16_gets_advice():
    plain = traced()
    assert Autocast().options(Profile(plain, find("T4"))) == []
    (advice,) = Autocast().advice(Profile(plain, find("T4")))
    assert "GradScaler" in advice.what and not advice.is_exact
    assert list(Autocast().advice(Profile(plain, find(DEVICE)))) == []
