"""What every technique owes: finite options, the saving it promises, the same training where it is exact, and the way back."""

import inspect
import random

import numpy as np
import pytest
import torch
from tests.conformance.conftest import CARD, Tapes, compatible
from tests.conformance.models import MODELS
from tests.conformance.training import Habits, Outcome, choice_of, train

from tightfit.allocator.settings import AllocatorSettings
from tightfit.devices.catalogue import find
from tightfit.errors import ApplyError
from tightfit.planner import problem as problems
from tightfit.planner.option import Option
from tightfit.runtime.apply import apply_choices
from tightfit.simulate.timeline_bytes import replay_levels
from tightfit.simulate.workspaces import with_workspaces_of
from tightfit.tape import Tape
from tightfit.techniques.registry import technique, techniques

NUM_STEPS = 4
NUM_COMBINATIONS = 20
# The habits of a training loop that every exact technique keeps step with.
HABITS = Habits(clips=True, accumulates=2, schedules=True, scales=True, reloads_at=1, evaluates=True)
# Techniques that work by what a loop does not do; they refuse it in so many words (tested with each).
USES_GRADIENTS_UP = {"update_in_backward"}
EXACT = [name for name, t in techniques().items() if t.exact]


def _levels(tape: Tape) -> np.ndarray:
    return replay_levels(with_workspaces_of(find(CARD), tape), AllocatorSettings()).allocated


def _same(plain: Outcome, other: Outcome, *, bitwise: bool) -> None:
    tolerance = {"rtol": 0.0, "atol": 0.0} if bitwise else {"rtol": 2e-4, "atol": 2e-6}
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
            problem = problems.build(_levels(tapes.of(model)), options)
            assert problem.peak_bytes(()) == _levels(tapes.of(model)).max()
            assert all(o.technique == name and o.exact <= technique(name).exact for o in options)


def _model_where_it_saves_most(name: str, tapes: Tapes) -> tuple[str, list[Option]]:
    offers = {model: tapes.together(name, model) for model in MODELS}

    def saved(item: tuple[str, list[Option]]) -> tuple[int, int]:
        problem = problems.build(_levels(tapes.of(item[0])), item[1])
        promised = problem.peak_bytes(()) - problem.peak_bytes(range(len(problem.options)))
        return promised, sum(-c.num_bytes for o in item[1] for c in o.changes)

    return max(offers.items(), key=saved)


@pytest.mark.parametrize("name", list(techniques()))
def test_the_traced_saving_is_the_promised_one(name: str, tapes: Tapes) -> None:
    model, options = _model_where_it_saves_most(name, tapes)
    options = [option for option in options if not option.needs_new_trace]
    if not any(option.changes for option in options):
        pytest.skip(f"{name} promises nothing on these models, or what it does is traced before it is planned with")
    before = _levels(tapes.of(model))
    problem = problems.build(before, options)
    promised = problem.peak_bytes(range(len(problem.options)))
    if not problem.options:
        pytest.skip(f"{name} lowers the peak of none of these models, and a plan leaves it out")
    after = _levels(tapes.of(model, options))
    assert after.max() == pytest.approx(
        promised, abs=technique(name).tolerance * max(1, int(before.max()) - promised) + 64 * 1024
    )


@pytest.mark.parametrize("name", EXACT)
def test_exact_techniques_train_the_same_with_all_habits(name: str, tapes: Tapes) -> None:
    habits = Habits(schedules=True, reloads_at=1, evaluates=True) if name in USES_GRADIENTS_UP else HABITS
    bitwise = technique(name).exactness.startswith("bit for bit")
    tried = 0
    for model in MODELS:
        options = [option for option in tapes.together(name, model) if option.exact]
        if not options or not any(o.where != "allocator" for o in options):
            continue
        tried += 1
        _same(
            train(model, (), num_steps=NUM_STEPS, habits=habits),
            train(model, options, num_steps=NUM_STEPS, habits=habits),
            bitwise=bitwise,
        )
    if not tried:
        pytest.skip(f"{name} is offered on none of these models; it has tests of its own")


@pytest.mark.parametrize("seed", range(NUM_COMBINATIONS))
def test_random_combinations_train_the_same(seed: int, tapes: Tapes) -> None:
    chance = random.Random(seed)
    model = list(MODELS)[seed % len(MODELS)]
    offered = [o for o in tapes.all_exact(model) if o.technique not in USES_GRADIENTS_UP]
    chosen = compatible(chance.sample(offered, k=min(len(offered), chance.randint(2, 8))))
    bitwise = all(technique(o.technique).exactness.startswith("bit for bit") for o in chosen)
    habits = Habits(clips=True, schedules=True, evaluates=True)
    num_steps = 20 if seed < len(MODELS) else NUM_STEPS
    plain = train(model, (), num_steps=num_steps, habits=habits)
    assert plain.losses[-1] != plain.losses[0]
    _same(plain, train(model, chosen, num_steps=num_steps, habits=habits), bitwise=bitwise)


@pytest.mark.parametrize("name", list(techniques()))
def test_undo_restores_everything(name: str, tapes: Tapes) -> None:
    for model in MODELS:
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
