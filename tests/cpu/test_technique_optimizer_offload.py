"""Optimizer offload: states at the host between steps, the same training to the bit, and nothing that the program could tell it by."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from tightfit.errors import ApplyError
from tightfit.planner.plan import Choice
from tightfit.runtime.apply import apply_choices
from tightfit.techniques.lazy_tensors.lazy_tensor import LazyTensor
from tightfit.techniques.session import Session

SIZE = 128 * 128 * 4
OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "for-loop": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
}


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    image = nn.Conv2d(64, 64, 3, padding=1).to(memory_format=torch.channels_last)
    return nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64), nn.Unflatten(1, (64, 1, 1)), image)


def offloaded(model: nn.Module, optimizer: torch.optim.Optimizer, host_bytes: int = 1 << 20) -> Session:
    settings = {"host_bytes": host_bytes}
    choice = Choice(
        technique="optimizer_offload", where="optimizer", settings=settings, saves_bytes=0, adds_seconds=0.0, exact=True
    )
    return apply_choices([choice], model, [optimizer])


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    model(torch.randn(4, 128, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def lazy(optimizer: torch.optim.Optimizer) -> int:
    return sum(isinstance(each, LazyTensor) for state in optimizer.state.values() for each in dict.values(state))


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_it_trains_the_same_to_the_bit_and_the_states_are_at_the_host(kind: str) -> None:
    plain, model = model_of(), model_of()
    optimizers = [OPTIMIZERS[kind](each.parameters()) for each in (plain, model)]
    session = offloaded(model, optimizers[1])
    for seed in range(6):
        step(plain, optimizers[0], seed)
        step(model, optimizers[1], seed)
    assert same(plain, model)
    # The weights of the linear layers and of the convolution; biases are too small to be worth a copy.
    assert lazy(optimizers[1]) % 3 == 0 and lazy(optimizers[1]) >= 3
    session.undo()
    assert not lazy(optimizers[1])
    step(plain, optimizers[0], 7)
    step(model, optimizers[1], 7)
    assert same(plain, model)


def test_who_asks_for_a_state_gets_an_ordinary_tensor_which_is_updated_as_in_the_plain_run() -> None:
    plain, model = model_of(), model_of()
    optimizers = [OPTIMIZERS["AdamW"](each.parameters()) for each in (plain, model)]
    offloaded(model, optimizers[1])
    held = []
    for seed in range(4):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            step(each, optimizer, seed)
        if seed == 1:
            held = [o.state[m[0].weight]["exp_avg"] for m, o in zip((plain, model), optimizers, strict=True)]
            assert [type(each) for each in held] == [torch.Tensor, torch.Tensor]
    # What the program has a name for is not moved any more, and follows the updates.
    assert torch.equal(held[0], held[1])
    assert optimizers[1].state[model[0].weight]["exp_avg"] is held[1]
    assert same(plain, model)


def test_a_state_that_is_written_to_is_what_the_next_step_finds() -> None:
    plain, model = model_of(), model_of()
    optimizers = [OPTIMIZERS["AdamW"](each.parameters()) for each in (plain, model)]
    offloaded(model, optimizers[1])
    for seed in range(3):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            step(each, optimizer, seed)
            for state in optimizer.state.values():
                state["exp_avg"].mul_(0.5)
                state["exp_avg_sq"] = state["exp_avg_sq"] * 1.5
    assert same(plain, model)


def test_checkpoints_copies_and_pickles_are_those_of_a_plain_run() -> None:
    plain, model = model_of(), model_of()
    optimizers = [OPTIMIZERS["AdamW"](each.parameters()) for each in (plain, model)]
    offloaded(model, optimizers[1])
    for seed in range(2):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            step(each, optimizer, seed)
    assert lazy(optimizers[1]) > 0
    expected, found = (optimizer.state_dict()["state"] for optimizer in optimizers)
    for index, state in expected.items():
        assert type(found[index]) is dict
        assert all(type(found[index][name]) is torch.Tensor for name in state)
        assert all(torch.equal(found[index][name], value) for name, value in state.items())
    assert lazy(optimizers[1]) > 0
    copied_model, copied = copy.deepcopy((model, optimizers[1]))
    assert not lazy(copied)
    pickled = pickle.loads(pickle.dumps(optimizers[1].state[model[0].weight]))
    assert type(pickled) is dict and torch.equal(pickled["exp_avg"], expected[0]["exp_avg"])
    file = io.BytesIO()
    torch.save(optimizers[1].state_dict(), file)
    other = model_of()
    other.load_state_dict(model.state_dict())
    resumed = OPTIMIZERS["AdamW"](other.parameters())
    resumed.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    for each, optimizer in ((plain, optimizers[0]), (model, optimizers[1]), (copied_model, copied), (other, resumed)):
        step(each, optimizer, 9)
    assert same(plain, model) and same(plain, copied_model) and same(plain, other)


def test_host_memory_is_that_of_the_plan_and_does_not_grow() -> None:
    model = model_of()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    states = 2 * sum(p.numel() * 4 for p in model.parameters() if p.numel() >= 4096)
    session = offloaded(model, optimizer, host_bytes=states)
    for seed in range(50):
        step(model, optimizer, seed)
    source: Any = next(each for each in dict.values(optimizer.state[model[0].weight]) if isinstance(each, LazyTensor))
    slab = source.source.encoded.part.slab
    assert (slab.free_bytes, slab.overflow_bytes) == (0, 0)
    session.undo()


def test_parameters_on_several_devices_are_refused() -> None:
    model = model_of()
    model[0].to("meta")
    with pytest.raises(ApplyError, match="the parameters of the optimizers are on cpu, meta"):
        offloaded(model, OPTIMIZERS["AdamW"](model.parameters()))
