"""Optimizer offload: states at the host between steps, the same training to the bit, and nothing that the program could tell it by."""

import copy
import gc
import io
import pickle
from typing import Any

import pytest
import torch
from tests.cpu.optimizer_training import DEVICE, peak_bytes, traced
from torch import nn

from tightfit.analysis.profile import Profile
from tightfit.devices.catalogue import find
from tightfit.errors import ApplyError
from tightfit.planner.plan import Choice
from tightfit.runtime.apply import apply_choices
from tightfit.simulate.step_work import priced
from tightfit.simulate.timeline import seconds_of_steps
from tightfit.tape import WaitKind
from tightfit.techniques.lazy_tensors.lazy_tensor import LazyTensor
from tightfit.techniques.optimizer.at_host.host_updates import HostUpdates
from tightfit.techniques.optimizer.optimizer_offload import OptimizerOffload
from tightfit.techniques.optimizer.states.quantized_states import EncodedState
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


# Room on the card for the states of one parameter (the convolution's), for all of them, and as in plans of before: nothing is brought ahead.
WINDOWS = {"one": 2 * 64 * 64 * 9 * 4, "all": 1 << 20, "older plans": None}


def offloaded(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    host_bytes: int = 1 << 20,
    window_bytes: int | None = 1 << 20,
    **more: Any,
) -> Session:
    settings = {"host_bytes": host_bytes, **({} if window_bytes is None else {"window_bytes": window_bytes}), **more}
    choice = Choice(
        technique="optimizer_offload", where="optimizer", settings=settings, saves_bytes=0, adds_seconds=0.0, exact=True
    )
    return apply_choices([choice], model, [] if optimizer is None else [optimizer])


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    model(torch.randn(4, 128, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def lazy(optimizer: torch.optim.Optimizer) -> int:
    return sum(isinstance(each, LazyTensor) for state in optimizer.state.values() for each in dict.values(state))


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_it_trains_the_same_to_the_bit_and_the_states_are_at_the_host(kind: str, window: str) -> None:
    plain, model = model_of(), model_of()
    optimizers = [OPTIMIZERS[kind](each.parameters()) for each in (plain, model)]
    session = offloaded(model, optimizers[1], window_bytes=WINDOWS[window])
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
    session = offloaded(model, optimizers[1])
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
    # Of a dict that the program has a name for there is no other.
    held = optimizers[1].state[model[0].weight]
    session.undo()
    states = dict(optimizers[1].state)
    assert states.pop(model[0].weight) is held and all(type(state) is dict for state in states.values())


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
    with pytest.raises(ApplyError, match="no optimizer holds weights of the model at its first call"):
        offloaded(model_of(), None)


def states_on_their_way(optimizer: torch.optim.Optimizer) -> int:
    found = [
        each.source for state in optimizer.state.values() for each in dict.values(state) if isinstance(each, LazyTensor)
    ]
    return sum(source._coming is not None for source in found if isinstance(source, EncodedState))


def test_the_next_states_are_on_their_way_while_a_parameter_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    seen = []
    update = torch.optim.AdamW.step.__wrapped__  # type: ignore[attr-defined]

    def spied(made: Any, closure: Any = None) -> Any:
        if made is not optimizer:
            seen.append(states_on_their_way(optimizer))
        return update(made, closure)

    monkeypatch.setattr(torch.optim.AdamW.step, "__wrapped__", spied)
    offloaded(model, optimizer)
    for seed in range(2):
        step(model, optimizer, seed)
    # Weight and bias in turn: the biases' are on the card. In the first step there are no states yet.
    assert seen == [0] * 6 + [4, 4, 2, 2, 0, 0]


@pytest.mark.parametrize("more", [{}, {"in_backward": True, "clips": False}, {"executor": "host"}])
def test_a_momentum_of_sparse_gradients_stays_where_it_is(more: dict[str, Any]) -> None:
    weights = []
    for is_offloaded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(80, 64, sparse=True), nn.Linear(64, 64))
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        if is_offloaded:
            offloaded(model, optimizer, **more)
        for number in range(3):
            model(torch.arange(number, 40)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    assert lazy(optimizer) == 1


def test_what_was_brought_for_an_update_that_does_not_come_is_dropped() -> None:
    plain, model = model_of(), model_of()
    optimizers = [OPTIMIZERS["AdamW"](each.parameters()) for each in (plain, model)]
    offloaded(model, optimizers[1])
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        step(each, optimizer, 0)
    model(torch.randn(4, 128)).square().mean().backward()
    gradient = model[2].weight.grad
    # An update that raises in the middle of the step, after which the first parameter is updated and the third is not.
    model[2].weight.grad = gradient.to_sparse()
    weights = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="sparse"):
        optimizers[1].step()
    assert states_on_their_way(optimizers[1]) == 0 and lazy(optimizers[1]) == 6
    assert [torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True)] == [
        False,
        False,
        True,
        True,
        True,
        True,
    ]


def test_parameters_that_get_no_gradient_for_a_step_and_new_groups_train_the_same() -> None:
    plain, model = model_of(), model_of()
    optimizers = [torch.optim.AdamW(each[0].parameters(), lr=0.01) for each in (plain, model)]
    offloaded(model, optimizers[1])
    for seed in range(6):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            if seed == 2:
                optimizer.add_param_group({"params": list(each[4].parameters()), "lr": 0.1})
            each[0].weight.requires_grad_(seed != 3)
            if seed == 4:
                optimizer.param_groups[0]["params"].reverse()
                optimizer.param_groups[0]["lr"] *= 0.5
            step(each, optimizer, seed)
    assert same(plain, model)
    assert lazy(optimizers[1]) == 4


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_updates_in_the_backward_pass_train_the_same_to_the_bit(kind: str, window: str) -> None:
    plain, model = model_of(), model_of()
    optimizers = [OPTIMIZERS[kind](each.parameters()) for each in (plain, model)]
    session = offloaded(model, optimizers[1], window_bytes=WINDOWS[window], in_backward=True, clips=False)
    for seed in range(6):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            each(torch.randn(4, 128, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert same(plain, model)
    assert session.statistics["parameters updated in backward"] == 6 * 6
    assert lazy(optimizers[1]) % 3 == 0 and lazy(optimizers[1]) >= 3
    assert states_on_their_way(optimizers[1]) == 0
    session.undo()
    assert not lazy(optimizers[1])


def test_in_the_backward_pass_states_come_in_the_order_of_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    session = offloaded(model, optimizer, in_backward=True, clips=False)
    for seed in range(4):
        step(model, optimizer, seed)
    order: list[Any] = []
    monkeypatch.setattr(EncodedState, "begin", _noting(EncodedState.begin, order, "comes"))
    monkeypatch.setattr(EncodedState, "whole", _noting(EncodedState.whole, order, "is used"))
    step(model, optimizer, 4)
    came = [source for what, source in order if what == "comes"]
    assert came == [source for what, source in order if what == "is used"]
    assert len(came) == len(set(came)) == 6
    # All that there is room for come before the first is used, which is the convolution's: the last in the order of the parameters.
    assert [what for what, _ in order[:6]] == ["comes"] * 6
    assert came[0].num_bytes == 64 * 64 * 9 * 4
    assert session.statistics["parameters updated in backward"] == 6 * 5


def _noting(method: Any, order: list[Any], what: str) -> Any:
    def noted(source: Any) -> Any:
        order.append((what, source))
        return method(source)

    return noted


def test_gradients_that_are_read_before_the_step_are_kept_and_the_states_still_move() -> None:
    plain, model = model_of(), model_of()
    optimizers = [OPTIMIZERS["AdamW"](each.parameters()) for each in (plain, model)]
    session = offloaded(model, optimizers[1], in_backward=True, clips=False)
    for seed in range(5):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            each(torch.randn(4, 128, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
            each[0].weight.grad.add_(0.01)
            optimizer.step()
            optimizer.zero_grad()
    assert same(plain, model)
    assert lazy(optimizers[1]) == 6
    assert "gradients are kept" in session.notes[0]


FUSED: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
}


def on_host(model: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> Session:
    return offloaded(model, optimizer, executor="host", **more)


@pytest.mark.parametrize("kind", FUSED)
def test_updates_on_the_host_are_those_of_its_fused_implementation_to_the_bit(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, model = model_of(), model_of()
    optimizers = [FUSED[kind](each.parameters()) for each in (plain, model)]
    updated: list[int] = []
    update = HostUpdates.update
    monkeypatch.setattr(
        HostUpdates, "update", lambda self, taken, groups: (updated.append(len(taken)), update(self, taken, groups))[1]
    )
    session = on_host(model, optimizers[1])
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]
    for seed in range(6):
        for each, optimizer, scheduler in zip((plain, model), optimizers, schedulers, strict=True):
            step(each, optimizer, seed)
            scheduler.step()
    assert same(plain, model)
    # In the first step the states are made, on the card; Adagrad's are there before.
    assert updated == [3 if kind == "Adagrad" else 0] + [3] * 5
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)
    session.undo()
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        step(each, optimizer, 7)
    assert same(plain, model)


def test_updates_on_the_host_differ_from_other_implementations_by_rounding() -> None:
    plain, model = model_of(), model_of()
    optimizers = [OPTIMIZERS["AdamW"](each.parameters()) for each in (plain, model)]
    on_host(model, optimizers[1])
    for seed in range(4):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            step(each, optimizer, seed)
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "how", ["in place", "behind autograd's back", "two elements exchanged", "new memory", "loaded"]
)
def test_a_weight_that_the_program_writes_to_is_what_the_update_on_the_host_begins_with(how: str) -> None:
    plain, model = model_of(), model_of()
    optimizers = [FUSED["AdamW"](each.parameters()) for each in (plain, model)]
    on_host(model, optimizers[1])
    for seed in range(5):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            step(each, optimizer, seed)
            weight = each[2].weight
            if seed == 2 and how == "in place":
                with torch.no_grad():
                    weight.mul_(0.5)
            elif seed == 2 and how == "behind autograd's back":
                weight.data.view(-1)[5] += 1.0
            elif seed == 2 and how == "two elements exchanged":
                weight.data.numpy()[3, [7, 9]] = weight.data.numpy()[3, [9, 7]]
            elif seed == 2 and how == "new memory":
                weight.data = weight.data.flip(0)
            elif seed == 2:
                each.load_state_dict({name: value * 2 for name, value in each.state_dict().items()})
    assert same(plain, model)


def test_states_that_the_program_reads_writes_or_keeps_are_updated_as_in_the_plain_run() -> None:
    plain, model = model_of(), model_of()
    optimizers = [FUSED["AdamW"](each.parameters()) for each in (plain, model)]
    on_host(model, optimizers[1])
    held = []
    for seed in range(6):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            step(each, optimizer, seed)
            optimizer.state[each[0].weight]["exp_avg"].mul_(0.5)
            if seed == 2:
                held.append(optimizer.state[each[2].weight]["exp_avg_sq"])
    assert same(plain, model)
    assert torch.equal(held[0], held[1])


def test_an_update_on_the_host_that_is_cut_short_leaves_no_copy_of_a_weight_that_is_taken_for_the_present_one() -> None:
    model = model_of()
    optimizer = FUSED["AdamW"](model.parameters())
    session = on_host(model, optimizer)
    for seed in range(3):
        step(model, optimizer, seed)
    updates = next(cell.on_host for cell in _encoded_states(optimizer))
    known = dict(updates._weights)
    assert all(kept.sums is not None for kept in known.values()) and len(known) == 3
    model(torch.randn(4, 128)).square().mean().backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostUpdates, "_upload", _raise)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    assert all(kept.sums is None for kept in updates._weights.values())
    session.undo()


def _raise(*_: Any) -> None:
    raise KeyboardInterrupt


def _encoded_states(optimizer: torch.optim.Optimizer) -> list[Any]:
    hooks: Any = optimizer._optimizer_load_state_dict_post_hooks
    return [hook.__self__ for hook in hooks.values()]


def test_the_host_does_not_update_what_it_has_no_implementation_for() -> None:
    model = model_of()
    with pytest.raises(ApplyError, match="RMSprop has no fused implementation for the CPU"):
        on_host(model, OPTIMIZERS["RMSprop"](model.parameters()))
    with pytest.raises(ApplyError, match="updated on the host are not updated in the backward pass"):
        on_host(model, FUSED["AdamW"](model.parameters()), in_backward=True)


NAME = "tightfit.techniques.optimizer.optimizer_offload:OptimizerOffload"
WAYS = {
    "with room for one": lambda s: "window_bytes" in s and not {"kernel", "in_backward", "executor"} & s.keys(),
    "fused": lambda s: s.get("kernel") == "fused" and "in_backward" not in s,
    "in the backward pass": lambda s: "in_backward" in s and "kernel" not in s,
    "on the host": lambda s: s.get("executor") == "host",
}


@pytest.mark.parametrize("way", WAYS)
def test_the_traced_run_takes_the_seconds_and_the_bytes_that_were_promised(way: str) -> None:
    card = find(DEVICE)
    # Layers whose states take longer on the link than a launch.
    plain = traced(width=1024, num_blocks=3)
    option = next(o for o in OptimizerOffload().options(Profile(plain, card)) if WAYS[way](dict(o.settings)))
    settings = "+".join(f"{name}:{value}" for name, value in option.settings.items())
    # The first step makes states, the second has copies of the weights to make.
    tape = traced(technique=NAME, settings=settings, width=1024, num_blocks=3, num_steps=3)
    promised = seconds_of_steps(priced(plain, card))[-1] + option.seconds
    assert seconds_of_steps(priced(tape, card))[-1] == pytest.approx(promised, rel=0.05)
    saved = peak_bytes(plain) - peak_bytes(plain, [option])
    assert saved > 0
    assert peak_bytes(plain) - peak_bytes(tape) == pytest.approx(saved, rel=0.15)
    # The block of host memory alone: the plain run's is that of the model before it moves to the card.
    assert tape.host_peak_bytes == pytest.approx(max(option.host_bytes, plain.host_peak_bytes), rel=0.01)
    assert (tape.waits.kind == WaitKind.HOST_UPDATES).any() == (way == "on the host")


@pytest.mark.parametrize(
    ("way", "num_steps"),
    [({}, 1000), ({"in_backward": True, "clips": False}, 100), ({"executor": "host"}, 200)],
    ids=["in the step", "in the backward pass", "on the host"],
)
def test_a_thousand_steps_take_no_more_memory_than_ten(way: dict[str, Any], num_steps: int) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    optimizer = FUSED["AdamW"](model.parameters())
    weights = 2 * 64 * 64 * 4
    # States, weights, and room for three gradients.
    session = offloaded(model, optimizer, host_bytes=5 * weights, window_bytes=weights, **way)
    held: list[tuple[int, int, int]] = []
    given = torch.randn(2, 64)
    for number in range(num_steps):
        model(given).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number in (10, num_steps - 1):
            source: Any = dict.__getitem__(optimizer.state[model[0].weight], "exp_avg").source
            slab = source.encoded.part.slab
            gc.collect()
            held.append((slab.free_bytes, len(slab._handed_out), len(gc.get_objects())))
            assert slab.overflow_bytes == 0
    assert held[0][:2] == held[1][:2]
    # Objects of Python that a step would leave, of which each has many.
    assert held[1][2] - held[0][2] < num_steps
    session.undo()


@pytest.mark.parametrize("saved_with", [True, False])
def test_a_checkpoint_goes_from_a_run_with_updates_on_the_host_to_one_without_and_back(saved_with: bool) -> None:
    models = [model_of() for _ in range(3)]
    optimizers = [FUSED["AdamW"](each.parameters()) for each in models]
    on_host(models[1 if saved_with else 2], optimizers[1 if saved_with else 2])
    for seed in range(3):
        for each, optimizer in zip(models[:2], optimizers[:2], strict=True):
            step(each, optimizer, seed)
    models[2].load_state_dict(models[1].state_dict())
    optimizers[2].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    for seed in range(3, 6):
        for each, optimizer in ((models[0], optimizers[0]), (models[2], optimizers[2])):
            step(each, optimizer, seed)
    assert same(models[0], models[2])


def test_a_checkpoint_in_memory_is_loaded_while_its_states_are_those_that_it_was_made_from() -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    session = offloaded(model, optimizer)
    step(model, optimizer, 0)
    optimizer.load_state_dict(optimizer.state_dict())
    copied = copy.deepcopy(optimizer.state_dict())
    step(model, optimizer, 1)
    optimizer.load_state_dict(copied)
    step(model, optimizer, 2)
    session.undo()


@pytest.mark.parametrize("executor", ["card", "host"])
def test_a_checkpoint_in_memory_whose_states_were_updated_since_is_refused(executor: str) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    session = offloaded(model, optimizer, executor=executor)
    step(model, optimizer, 0)
    kept = optimizer.state_dict()
    step(model, optimizer, 1)
    with pytest.raises(ApplyError, match=r"copy\.deepcopy"):
        optimizer.load_state_dict(kept)
    session.undo()


def test_a_checkpoint_in_memory_of_another_optimizer_is_refused() -> None:
    models = model_of(), model_of()
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    sessions = [offloaded(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]
    for model, optimizer in zip(models, optimizers, strict=True):
        step(model, optimizer, 0)
    with pytest.raises(ApplyError, match=r"another optimizer.*copy\.deepcopy"):
        optimizers[1].load_state_dict(optimizers[0].state_dict())
    for session in sessions:
        session.undo()


@pytest.mark.parametrize("executor", ["card", "host"])
def test_what_a_checkpoint_in_memory_has_is_the_state_itself_as_in_the_plain_run(executor: str) -> None:
    kept = []
    for is_planned in (False, True):
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters(), fused=executor == "host")
        session = offloaded(model, optimizer, executor=executor) if is_planned else None
        step(model, optimizer, 0)
        kept.append(optimizer.state_dict()["state"][0]["exp_avg"])
        for seed in (1, 2):
            step(model, optimizer, seed)
        if session is not None:
            session.undo()
    assert torch.equal(*kept)


def test_it_may_be_put_on_in_inference_mode() -> None:
    pairs = []
    for kind in ("plain", "offloaded"):
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if kind == "offloaded":
            with torch.inference_mode():
                # More than the slab has room for, too.
                offloaded(model, optimizer, host_bytes=SIZE)
        for seed in range(2):
            step(model, optimizer, seed)
        pairs.append(model)
    assert same(*pairs)
