"""Checkpointing with inputs at the host: the same gradients to the bit, inputs that leave and come back, and one engine with activation offload."""

import pytest
import torch
from tests.conformance import large_models
from tests.conformance.large_models import Decoder
from torch import nn

from tightfit.analysis.profile import Profile
from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.capture.trace import trace
from tightfit.devices.catalogue import find
from tightfit.engine import copy_engines
from tightfit.errors import ApplyError
from tightfit.planner.option import Option
from tightfit.planner.plan import Choice
from tightfit.runtime.apply import apply_choices
from tightfit.techniques.registry import technique

INPUT = 2 * 20 * 16 * 4


def choice(name: str, number: int, **settings: object) -> Choice:
    moves = {"following": "+1", "smallest_bytes": 1, "host_bytes": 1 << 16} if name != "checkpointing" else {}
    return Choice(
        technique=name,
        where=f"Decoder.blocks.{number}",
        settings=moves | settings,
        saves_bytes=0,
        adds_seconds=0.0,
        exact=True,
    )


def recomputed(number: int) -> Choice:
    return choice("offloaded_checkpointing", number, storages=[[INPUT, 1]])


def small(num_blocks: int = 5) -> Decoder:
    torch.manual_seed(0)
    return Decoder(50, 16, num_blocks, 2)


def step_of(model: nn.Module, length: int = 20) -> list[torch.Tensor]:
    model.zero_grad()
    model(torch.arange(2 * length).reshape(2, length)).backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("choices", "num_moved"),
    [
        ([recomputed(0), recomputed(1), recomputed(2)], 3),
        # The border of one is the block of another.
        ([recomputed(1), recomputed(3), choice("activation_offload", 0), choice("activation_offload", 2)], None),
        ([recomputed(1), choice("checkpointing", 2), choice("checkpointing", 0)], 1),
    ],
    ids=["a row", "in turn with all of a block", "beside plain checkpoints"],
)
def test_inputs_leave_and_gradients_are_the_same_to_the_bit(choices: list[Choice], num_moved: int | None) -> None:
    model = small()
    plain = step_of(model)
    session = apply_choices(choices, model, [])
    for _ in range(3):
        session.statistics.clear()
        assert all(torch.equal(a, b) for a, b in zip(plain, step_of(model), strict=True))
        assert session.statistics["storages that stayed"] == session.statistics["calls unlike the plan"] == 0
    if num_moved is None:
        assert session.statistics["offloaded bytes"] > 2 * INPUT * 9
    else:
        assert session.statistics["offloaded bytes"] == num_moved * INPUT
    # A batch of another length moves what there is.
    found = step_of(model, 12)
    session.undo()
    assert all(torch.equal(a, b) for a, b in zip(step_of(model, 12), found, strict=True))


@pytest.mark.parametrize("num_kept", [1, 4])
def test_products_that_are_kept_leave_too_and_gradients_are_the_same_to_the_bit(num_kept: int) -> None:
    model = small()
    plain = step_of(model)
    # The products of a block: queries, keys and values together, scores, the mixed values, their projection, and two of the wide layer.
    choices = [choice("offloaded_checkpointing", number, keep=list(range(num_kept))) for number in (0, 1, 2)]
    session = apply_choices(choices, model, [])
    for retains in (False, True, False):
        session.statistics.clear()
        assert all(torch.equal(a, b) for a, b in zip(plain, step_of(model), strict=True))
        # The input and what is kept, once each.
        assert session.statistics["offloaded storages"] == 3 * (1 + num_kept)
        if retains:
            model.zero_grad()
            loss = model(torch.arange(40).reshape(2, 20))
            loss.backward(retain_graph=True)
            model.zero_grad()
            loss.backward()
            assert all(torch.equal(a, p.grad) for a, p in zip(plain, model.parameters(), strict=True))
    session.undo()


def test_an_input_that_comes_back_changed_is_found_before_anything_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(source: torch.Tensor, target: torch.Tensor) -> None:
        with torch.no_grad():
            target.copy_(source)
            target[len(target) // 2] += 1

    model = small()
    session = apply_choices([recomputed(0), recomputed(1)], model, [])
    monkeypatch.setattr(copy_engines, "_copy", broken)
    with pytest.raises(ApplyError, match=r"other values.*--without offloaded_checkpointing"):
        step_of(model)
    session.undo()


def test_options_are_offered_where_a_block_follows_and_nothing_else_has_the_input() -> None:
    target = GeneratorFunction(location=large_models.__file__, function="decoder", parameters={})
    tape = trace(target, label="decoder", device="RTX 4090", num_steps=2).tape
    offered = technique("offloaded_checkpointing").options(Profile(tape, find("RTX 4090")))
    options = {o.where: o for o in offered if "keep" not in o.settings}
    plainly = {o.where: o for o in technique("checkpointing").options(Profile(tape, find("RTX 4090")))}
    # The first is given what the model's forward may have a name for, and the last has none after it.
    assert sorted(options) == [f"Decoder.blocks.{number}" for number in (1, 2, 3, 4)]
    for where, option in options.items():
        assert option.host_bytes == 8 * 512 * 512 * 4
        assert option.seconds == pytest.approx(plainly[where].seconds, rel=0.02)
        assert _saved(option) == _saved(plainly[where]) + option.host_bytes


def _saved(option: Option) -> int:
    return -sum(change.num_bytes for change in option.changes if change.num_bytes < 0) // 2
