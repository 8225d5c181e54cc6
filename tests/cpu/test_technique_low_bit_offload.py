"""Optimizer states in few bits at the host: what is there and how much, the arithmetic of each format, checkpoints, and that training goes as it should."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cpu.optimizer_training import DEVICE, peak_bytes, traced
from torch import nn

from tightfit.analysis.profile import Profile
from tightfit.devices.catalogue import find
from tightfit.errors import ApplyError
from tightfit.planner.plan import Choice
from tightfit.runtime.apply import apply_choices
from tightfit.techniques.lazy_tensors.lazy_tensor import LazyTensor
from tightfit.techniques.precision.coded_host_codec import RoundedCodec
from tightfit.techniques.precision.low_bit_offload import LowBitOffload
from tightfit.techniques.precision.master_residual import RESIDUAL, residual_of, with_residual
from tightfit.techniques.session import Session

WAYS: dict[str, dict[str, Any]] = {
    "8-bit": {"format": "8-bit"},
    "bf16": {"format": "bf16"},
    "8-bit in backward": {"format": "8-bit", "in_backward": True, "clips": False},
    "8-bit, master": {"format": "8-bit", "master": "residual"},
}


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))


def applied(model: nn.Module, optimizer: torch.optim.Optimizer, **given: Any) -> Session:
    choice = Choice(
        technique="low_bit_offload",
        where="optimizer",
        settings={"host_bytes": 1 << 20, "window_bytes": 1 << 18, **given},
        saves_bytes=0,
        adds_seconds=0.0,
        exact=False,
    )
    return apply_choices([choice], model, [optimizer])


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    rows = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))
    loss = (model(rows) - rows.flip(1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def lazy(optimizer: torch.optim.Optimizer) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for state in optimizer.state.values():
        for name, value in dict.items(state):
            if isinstance(value, LazyTensor):
                found.setdefault(name, []).append(value)
    return found


@pytest.mark.parametrize(("kind", "way"), [(torch.optim.Adam, "8-bit"), *((torch.optim.AdamW, way) for way in WAYS)])
def test_it_trains_as_the_plain_run_does_and_comes_back(way: str, kind: Any) -> None:
    plain, model = model_of(), model_of()
    optimizers = kind(plain.parameters(), lr=3e-3), kind(model.parameters(), lr=3e-3)
    session = applied(model, optimizers[1], **WAYS[way])
    losses = [[step(m, o, seed) for seed in range(120)] for m, o in zip((plain, model), optimizers, strict=True)]
    assert losses[0][-1] < losses[0][0] / 4
    assert losses[1][-1] == pytest.approx(losses[0][-1], rel=0.05)
    away = lazy(optimizers[1])
    assert set(away) == {"exp_avg", "exp_avg_sq"} | ({RESIDUAL} if "master" in WAYS[way] else set())
    session.undo()
    assert not lazy(optimizers[1]) and all(p.dtype == torch.float32 for p in model.parameters())
    assert all(RESIDUAL not in state for state in optimizers[1].state.values())
    assert step(model, optimizers[1], 121) == pytest.approx(step(plain, optimizers[0], 121), rel=0.1)


@pytest.mark.parametrize(
    ("technique", "given"),
    [
        ("pure_bf16", {"rounding": "stochastic"}),
        ("pure_bf16", {"rounding": "compensated"}),
        ("low_bit_offload", {"host_bytes": 1 << 20, "window_bytes": 1 << 18, **WAYS["8-bit, master"]}),
    ],
)
def test_a_weight_that_the_program_casts_back_is_updated_in_float32(technique: str, given: dict[str, Any]) -> None:
    def update() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    choice = Choice(
        technique=technique, where="optimizer", settings=given, saves_bytes=0, adds_seconds=0.0, exact=False
    )
    session = apply_choices([choice], model, [optimizer])
    update()
    # As programs do that want normalisations in float32.
    model[1].float()
    before = model[1].weight.detach().clone()
    update()
    session.undo()
    assert torch.equal(model[1].weight, before - 1e-3)


@pytest.mark.parametrize("num_classes", [1, 3])
def test_a_buffer_that_counts_is_refused_where_bfloat16_would_stop_it(num_classes: int) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("calls", torch.full((num_classes,), 250.0))
            self.register_buffer("mean", torch.full((num_classes,), 300.5))
            self.register_buffer("tokens", torch.zeros(2))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            self.calls[:1] += 1
            self.mean.mul_(0.9)
            self.tokens += torch.tensor([300, 0])
            return self.layer(rows)

    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    applied(model, optimizer, **WAYS["8-bit, master"])
    for _ in range(5):
        model(torch.ones(2, 4))
    with pytest.raises(ApplyError, match="the buffer calls counts in bfloat16"):
        model(torch.ones(2, 4))
    assert model.calls[0] == 256


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_small_parameters_train_by_less_than_their_last_bit_too(kind: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    optimizer = kind(model.parameters(), lr=1e-4)
    session = applied(model, optimizer, **WAYS["8-bit, master"])
    for _ in range(20):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert bool(optimizer.state_dict()["state"]) == (kind is torch.optim.AdamW)
    session.undo()
    # In bfloat16 alone it would still be 1: its last bit there is 2 ** -8.
    assert model[1].weight.mean().item() == pytest.approx(1 - 20e-4, abs=1e-4)


@pytest.mark.parametrize(
    ("way", "bytes_each"), [("8-bit", 2 * (1 + 4 / 256)), ("bf16", 4.0), ("8-bit, master", 3 + 8 / 256)]
)
def test_the_host_has_so_many_bytes_for_each_parameter(way: str, bytes_each: float) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    applied(model, optimizer, **WAYS[way])
    step(model, optimizer, 0)
    (value, *_), num_large = lazy(optimizer)["exp_avg"], sum(p.numel() for p in model.parameters() if p.numel() >= 4096)
    slab = value.source.encoded.parts[0].part.slab
    assert slab.overflow_bytes == 0
    assert slab.num_bytes - slab.free_bytes == pytest.approx(bytes_each * num_large, abs=4 * 512)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=20), st.integers(0, 100))
def test_a_weight_with_its_rest_is_within_a_254th_of_its_last_bit(values: list[float], seed: int) -> None:
    value = torch.tensor(values)
    weight = value.to(torch.bfloat16)
    rest = residual_of(value, weight, torch.Generator().manual_seed(seed))
    found = with_residual(weight, rest)
    last_bit = torch.exp2(torch.floor(torch.log2(weight.float().abs().clamp_min(2.0**-126))) - 7)
    assert ((found - value).abs() <= last_bit / 254 * 1.001 + 1e-37).all()


def test_rests_are_right_on_average_and_what_is_no_number_stays_one() -> None:
    value = torch.full((200_000,), 1.0 + 0.3 / 128)
    weight = value.to(torch.bfloat16)
    found = with_residual(weight, residual_of(value, weight, torch.Generator().manual_seed(0)))
    assert float(found.double().mean()) == pytest.approx(1.0 + 0.3 / 128, abs=2e-7)
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0])
    back = with_residual(odd.to(torch.bfloat16), residual_of(odd, odd.to(torch.bfloat16), torch.Generator()))
    assert torch.equal(back.isnan(), odd.isnan()) and torch.equal(back[1:], odd[1:])


def test_an_average_that_changes_by_less_than_its_last_bit_is_right_on_average() -> None:
    codec, value = RoundedCodec(), torch.full((1 << 16,), 1.0 + 1 / 1024)
    found = codec.decode("exp_avg_sq", codec.encode("exp_avg_sq", value), value.shape, value.dtype)
    assert set(found.unique().tolist()) == {1.0, 1.0 + 1 / 128}
    assert float(found.double().mean()) == pytest.approx(1.0 + 1 / 1024, abs=2e-4)
    half = value.to(torch.bfloat16)
    assert torch.equal(codec.decode("x", codec.encode("x", half), half.shape, half.dtype), half)


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_has_the_keys_of_a_plain_run_and_is_taken_on(way: str) -> None:
    plain, model = model_of(), model_of()
    optimizers = torch.optim.AdamW(plain.parameters(), lr=3e-3), torch.optim.AdamW(model.parameters(), lr=3e-3)
    applied(model, optimizers[1], **WAYS[way])
    for seed in range(5):
        for m, o in zip((plain, model), optimizers, strict=True):
            step(m, o, seed)
    saved, expected = optimizers[1].state_dict(), optimizers[0].state_dict()
    assert {k: set(v) for k, v in saved["state"].items()} == {k: set(v) for k, v in expected["state"].items()}
    assert all(v.dtype == torch.float32 for state in saved["state"].values() for v in state.values())
    other = model_of()
    continued = torch.optim.AdamW(other.parameters(), lr=3e-3)
    applied(other, continued, **WAYS[way])
    other.load_state_dict(plain.state_dict())
    continued.load_state_dict(expected)
    assert lazy(continued)["exp_avg"]
    assert step(other, continued, 9) == pytest.approx(step(plain, optimizers[0], 9), rel=0.02)
    assert step(other, continued, 10) == pytest.approx(step(plain, optimizers[0], 10), rel=0.05)


def test_a_weight_that_the_program_writes_to_has_no_rest() -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    session = applied(model, optimizer, **WAYS["8-bit, master"])
    for seed in range(2):
        step(model, optimizer, seed)
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    model[2].weight.data.fill_(0.5)
    session.undo()
    assert torch.equal(model[0].weight, torch.ones(128, 64)) and torch.equal(
        model[2].weight, torch.full((64, 128), 0.5)
    )


def test_what_is_not_known_is_refused() -> None:
    model = model_of()
    for settings_of in (
        {"format": "3-bit"},
        {"format": "bf16", "master": "residual"},
        {"format": "8-bit", "master": "x"},
    ):
        with pytest.raises(ApplyError, match="is not known"):
            applied(model, torch.optim.AdamW(model.parameters()), **settings_of)


@pytest.mark.parametrize("way", ["bf16", "8-bit, master"])
def test_the_traced_run_takes_the_bytes_that_were_promised(way: str) -> None:
    plain = traced(num_blocks=8)
    option = next(
        option
        for option in LowBitOffload().options(Profile(plain, find(DEVICE)))
        if WAYS[way].items() <= option.settings.items()
        and not option.settings.keys() & ({"in_backward", "kernel"} | {"master"} - WAYS[way].keys())
    )
    settings_text = "+".join(f"{name}:{value}" for name, value in option.settings.items())
    technique = "tightfit.techniques.precision.low_bit_offload:LowBitOffload"
    tape = traced(num_blocks=8, technique=technique, settings=settings_text)
    # The weights are made at the host, which is more.
    assert tape.host_peak_bytes <= max(plain.host_peak_bytes, 1.01 * option.host_bytes)
    promised = peak_bytes(plain) - peak_bytes(plain, [option])
    assert (
        peak_bytes(plain) - peak_bytes(tape) == pytest.approx(promised, rel=LowBitOffload.tolerance / 2)
        and promised > 0
    )
