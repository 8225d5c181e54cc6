"""What every technique owes: finite options, the saving it promises, the same training where it is exact, and the way back."""

import dataclasses
import functools
import gc
import inspect
import random

import pytest
import torch
from tests.conformance.conftest import Tapes, compatible
from tests.conformance.models import MODELS
from tests.conformance.savings import ADVICE_ONLY, allocated, saving_of
from tests.conformance.training import Habits, Outcome, choice_of, train

from tightfit.errors import ApplyError
from tightfit.planner import problem as problems
from tightfit.planner.option import Option
from tightfit.runtime.apply import apply_choices
from tightfit.techniques.registry import technique, techniques
from tightfit.techniques.session import Session

# Two before the states are saved and loaded, and one after.
NUM_STEPS = 3
NUM_COMBINATIONS = 20
NUM_LONG_STEPS = 12
# The habits of a training loop that every exact technique keeps step with.
HABITS = Habits(clips=True, accumulates=2, schedules=True, scales=True, reloads_at=1, evaluates=True)
# Techniques that work by what a loop does not do; they refuse it in so many words (tested with each).
USES_GRADIENTS_UP = {"update_in_backward"}
EXACT = [name for name, t in techniques().items() if t.exact]
OURS = [name for name, t in techniques().items() if type(t).__module__.startswith("tightfit.")]
BORDERS = ("before the forward", "after the forward", "before the optimizer", "after the optimizer")


@functools.cache
def _plain(model: str, num_steps: int, habits: Habits) -> Outcome:
    return train(model, (), num_steps=num_steps, habits=habits)


def _same(plain: Outcome, other: Outcome, *, bitwise: bool) -> None:
    is_double = next(iter(plain.state.values())).dtype == torch.float64
    rounding = {"rtol": 1e-7, "atol": 1e-9} if is_double else {"rtol": 2e-4, "atol": 2e-6}
    tolerance = {"rtol": 0.0, "atol": 0.0} if bitwise else rounding
    torch.testing.assert_close(torch.tensor(other.losses), torch.tensor(plain.losses), **tolerance)
    for expected, found in zip(plain.gradients, other.gradients, strict=True):
        for name in found:
            torch.testing.assert_close(found[name], expected[name], **tolerance, msg=lambda m, n=name: f"{n}: {m}")
    assert plain.state.keys() == other.state.keys()
    # Adam turns a gradient that is nearly nothing into a step of the learning rate, which is 1e-3, whatever its sign.
    loose = tolerance if bitwise else {"rtol": 1e-3, "atol": 2e-3}
    for name, value in plain.state.items():
        torch.testing.assert_close(other.state[name], value, **loose, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", list(techniques()))
def test_options_are_numbers_within_the_run(name: str, tapes: Tapes) -> None:
    for model in MODELS:
        options = tapes.offered(name, model)
        assert len({option.key for option in options}) == len(options)
        if options:
            problem = problems.build(allocated(tapes.of(model)), options)
            assert problem.peak_bytes(()) == allocated(tapes.of(model)).max()
            assert all(o.technique == name and o.exact <= technique(name).exact for o in options)


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("name", list(techniques()))
def test_the_traced_saving_is_the_promised_one(name: str, tapes: Tapes) -> None:
    found = saving_of(name, tapes)
    # What is ours promises something on one of the workloads at least; kernels of an optimizer may save time alone.
    assert found.promised < found.plain or name not in OURS or technique(name).is_for_speed
    assert found.traced == pytest.approx(
        found.promised, abs=technique(name).tolerance * max(1, found.plain - found.promised) + 64 * 1024
    )


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("name", EXACT)
def test_exact_techniques_train_the_same_with_all_habits(name: str, first: int, tapes: Tapes) -> None:
    """On every second place that a technique has, so that each technique is tried in each turn."""
    habits = Habits(schedules=True, reloads_at=1, evaluates=True) if name in USES_GRADIENTS_UP else HABITS
    bitwise = technique(name).exactness.startswith("bit for bit")
    if name in ADVICE_ONLY:
        with pytest.raises(ApplyError, match="suggestion"):
            technique(name).apply(Session(model=torch.nn.Linear(1, 1), optimizers=[]), [])
        return
    ways = [(model, options) for model in MODELS for options in _ways(name, model, tapes)]
    assert ways
    for model, options in ways[first::2] or ways:
        other = train(model, options, num_steps=NUM_STEPS, habits=habits)
        _same(_plain(model, NUM_STEPS, habits), other, bitwise=bitwise)


def _ways(name: str, model: str, tapes: Tapes) -> list[list[Option]]:
    """What is put on `model` together. Where its cache is emptied says nothing of its numbers: each place is tried on one model."""
    if name == "empty_cache":
        offered = tapes.offered(name, "uneven")[:1] if model == "convolutions" else []
        return [[dataclasses.replace(o, settings={"border": border})] for o in offered for border in BORDERS]
    options = [option for option in tapes.together(name, model) if option.exact]
    if technique(name).is_for_speed and not options and model == "convolutions":
        # Batches so small are not worth it: what it does to them is tried in `tests/cpu/test_batch_copies.py`.
        settings = {"host_bytes": 1 << 16, "card_bytes": 1 << 15}
        options = [Option(technique=name, where="batches", settings=settings, changes=(), seconds=0.0, exact=True)]
    return [options] if options and (name != "allocator_settings" or model == "convolutions") else []


@pytest.mark.by_turns(2)
@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, NUM_COMBINATIONS))]
)
def test_random_combinations_train_the_same(seed: int, tapes: Tapes) -> None:
    chance = random.Random(seed)
    model = list(MODELS)[seed % len(MODELS)]
    offered = [o for o in tapes.all_exact(model) if o.technique not in USES_GRADIENTS_UP]
    chosen = compatible(chance.sample(offered, k=min(len(offered), chance.randint(2, 8))))
    bitwise = all(technique(o.technique).exactness.startswith("bit for bit") for o in chosen)
    num_steps = NUM_LONG_STEPS if seed < len(MODELS) else NUM_STEPS
    # Over many steps another order of sums turns a ReLU of float32 on here and there, and Adam enlarges what is nearly nothing.
    habits = Habits(clips=True, schedules=True, evaluates=True, doubles=num_steps > NUM_STEPS and not bitwise)
    plain = _plain(model, num_steps, habits)
    assert plain.losses[-1] != plain.losses[0]
    trained = None
    while trained is None:
        refused = ""
        try:
            trained = train(model, chosen, num_steps=num_steps, habits=habits)
        except ApplyError as error:
            # What two techniques do together is seen when a plan is traced, which then leaves one of them out.
            refused = error.technique
        if refused:
            chosen = [option for option in chosen if option.technique != refused]
            gc.collect()
            assert chosen
    _same(plain, trained, bitwise=bitwise)


@pytest.mark.by_turns(2)
@pytest.mark.parametrize(
    "models", [list(MODELS)[::2], pytest.param(list(MODELS)[1::2], marks=pytest.mark.slow)], ids=["", "more"]
)
@pytest.mark.parametrize("name", list(techniques()))
def test_undo_restores_everything(name: str, models: list[str], tapes: Tapes) -> None:
    for model in models:
        options = tapes.together(name, model)
        if not options:
            continue
        made, loss_of = MODELS[model]("cpu")
        optimizer = torch.optim.AdamW([p for p in made.parameters() if p.requires_grad], lr=1e-3)
        before = _shape_of(made, optimizer)
        try:
            session = apply_choices([choice_of(o) for o in options], made, [optimizer])
        except ApplyError:
            assert _shape_of(made, optimizer) == before
            continue
        assert list(made.state_dict()) == before["state"]
        loss_of(0).backward()
        optimizer.step()
        optimizer.zero_grad()
        session.undo()
        assert _shape_of(made, optimizer) == before


def _shape_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Everything about a model and its optimizer that a technique could have left changed, but for values."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")
    modules = dict(model.named_modules())
    return {
        "state": list(model.state_dict()),
        "types": {name: (value.dtype, value.shape) for name, value in model.state_dict().items()},
        "attributes": {name: sorted(vars(module)) for name, module in modules.items()},
        "hooks": {name: [len(getattr(module, hook)) for hook in hooks] for name, module in modules.items()},
        "forwards": {name: str(inspect.signature(module.forward)) for name, module in modules.items()},
        "classes": {name: type(module) for name, module in modules.items()},
        "leaves": {name: len(p._post_accumulate_grad_hooks or ()) for name, p in model.named_parameters()},
        "optimizer": sorted(vars(optimizer)),
        "optimizer_class": type(optimizer),
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
        "defaults": dict(optimizer.defaults),
    }
