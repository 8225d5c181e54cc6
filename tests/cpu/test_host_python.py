"""Python of techniques takes the host's time, in promises and in traced runs alike."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from tightfit.analysis.profile import Profile
from tightfit.analysis.recomputable import seconds_in_python
from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.capture.trace import Preparation, trace
from tightfit.cost.host_python import REFERENCE_SECONDS, HostWork
from tightfit.cost.steps import step_operators
from tightfit.devices.calibration import Calibration
from tightfit.devices.catalogue import find
from tightfit.planner.option import Option
from tightfit.planner.plan import Choice
from tightfit.planner.problem import together
from tightfit.planner.sides import Sides
from tightfit.simulate.step_work import priced
from tightfit.simulate.timeline import seconds_of_step
from tightfit.tape import Tape, WaitKind
from tightfit.techniques.registry import technique

CARD = "RTX 4090"
NUM_BLOCKS = 6


class Block(nn.Module):
    """Three layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.down(self.act(self.up(rows)))


class Net(nn.Module):
    """Blocks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(NUM_BLOCKS))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            rows = block(rows)
        return rows


def workload(width: int, num_rows: int) -> Iterator[torch.Tensor]:
    """Trains them."""
    model = Net(width).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    while True:
        loss = model(torch.randn(num_rows, width, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@functools.cache
def tape_of(width: int, num_rows: int, choices: tuple[str, ...] = (), name: str = "") -> Tape:
    """The traced run, with the options of these keys on it."""
    options = [o for o in offered(width, num_rows, name) if o.key in choices] if choices else []
    return trace(
        GeneratorFunction(
            location=str(Path(__file__)), function="workload", parameters={"width": width, "num_rows": num_rows}
        ),
        label="blocks",
        device=CARD,
        num_steps=3,
        preparation=Preparation(
            function="tightfit.runtime.attach:prepare",
            argument={"choices": [dataclasses.asdict(choice_of(option)) for option in options]},
        ),
    ).tape


def choice_of(option: Option) -> Choice:
    return Choice(
        technique=option.technique,
        where=option.where,
        settings=option.settings,
        saves_bytes=0,
        adds_seconds=option.seconds,
        exact=True,
    )


def offered(width: int, num_rows: int, name: str) -> Sequence[Option]:
    """The options of the blocks."""
    options = list(technique(name).options(Profile(tape_of(width, num_rows), find(CARD))))
    return [o for o in options if o.where.rpartition(".")[2].isdecimal()] or options


def promised(options: Sequence[Option]) -> float:
    """What a step takes longer with all of them."""
    return Profile(tape_of(*SMALL), find(CARD)).step.added(together(options))


def in_python(tape: Tape) -> float:
    """Seconds of the last step."""
    begin, end = step_operators(tape)[-1]
    waits = tape.waits
    own = (waits.kind == WaitKind.HOST_RUNS) & (waits.operator >= begin) & (waits.operator <= end)
    return 1e-6 * float(waits.event[own].sum())


def seconds_of(tape: Tape) -> float:
    return seconds_of_step(priced(tape, find(CARD)))


SMALL, LARGE = (64, 16), (2048, 32768)


@pytest.mark.parametrize("name", ["checkpointing", "selective_checkpointing"])
def test_a_step_that_waits_for_the_host_is_longer_as_promised(name: str) -> None:
    options = offered(*SMALL, name)
    assert len(options) == NUM_BLOCKS
    keys = tuple(option.key for option in options)
    plain, planned = tape_of(*SMALL), tape_of(*SMALL, keys, name)
    of_tensor = HostWork.RECOMPUTED_TENSOR.value
    of_tensor += HostWork.SELECTED_TENSOR.value * (name == "selective_checkpointing")
    # Two layers save their input and their weight, and the activation between them its input; the weight that the batch meets is for no gradient.
    expected = NUM_BLOCKS * HostWork.RECOMPUTED_CALL.value + (5 * NUM_BLOCKS - 1) * of_tensor
    assert in_python(planned) == pytest.approx(expected, rel=0.001)
    assert in_python(plain) == 0
    added = seconds_of(planned) - seconds_of(plain)
    assert added == pytest.approx(promised(options), rel=0.1)
    assert added > in_python(planned)


def test_a_block_is_taken_to_save_its_results_and_weights_and_not_its_biases() -> None:
    profile = Profile(tape_of(*SMALL), find(CARD))
    block = next(each for each in profile.blocks if each.path == "Net.blocks.0")
    assert block.num_saved_weights == 2
    # It really saves its input too, which is not counted among its results.
    of_call = HostWork.RECOMPUTED_CALL.value + 5 * HostWork.RECOMPUTED_TENSOR.value
    assert seconds_in_python(block) == pytest.approx(len(block.calls) * of_call, rel=0.05)


def test_a_step_that_waits_for_the_card_hides_it() -> None:
    keys = tuple(option.key for option in offered(*LARGE, "checkpointing"))
    planned = tape_of(*LARGE, keys, "checkpointing")
    priced_tape = priced(planned, find(CARD))
    free = dataclasses.replace(priced_tape, python_factor=0.0)
    assert in_python(planned) > 0
    assert seconds_of_step(priced_tape) == pytest.approx(seconds_of_step(free), rel=0.01)


def test_a_slower_processor_takes_longer_for_it() -> None:
    keys = tuple(option.key for option in offered(*SMALL, "checkpointing"))
    planned = tape_of(*SMALL, keys, "checkpointing")
    slow = Calibration(device=CARD, seconds={"issue": 10e-6, "python": 2 * REFERENCE_SECONDS})
    assert priced(planned, find(CARD), slow).python_factor == pytest.approx(2.0)
    assert seconds_of_step(priced(planned, find(CARD), slow)) == pytest.approx(2 * seconds_of(planned), rel=0.01)


def test_updates_in_the_backward_pass_cost_their_parameters() -> None:
    (option, *_) = offered(*SMALL, "update_in_backward")
    planned = tape_of(*SMALL, (option.key,), "update_in_backward")
    assert in_python(planned) == pytest.approx(4 * NUM_BLOCKS * HostWork.UPDATED_PARAMETER.value, rel=0.01)
    added = seconds_of(planned) - seconds_of(tape_of(*SMALL))
    assert option.seconds == pytest.approx(added, rel=0.1)


def test_what_is_added_is_what_the_longer_side_takes() -> None:
    step, more = Sides(on_card=10.0, on_host=7.0), Sides(on_host=2.0)
    assert step.added(Sides(on_card=1.0)) == 1.0
    assert step.added(more) == 0.0
    assert step.added(more * 2) == 1.0
    # What the host has to spare is there once, however many share it.
    assert step.added(more + more + more) == pytest.approx(3.0)
    assert Sides(on_card=1.0, on_host=5.0).added(Sides(on_card=2.0, on_host=1.0)) == 1.0


def test_tiles_cost_their_calls() -> None:
    # The most tiles for the modules that are offered in them, which are the least.
    options = {
        option.where: option for option in offered(*SMALL, "tiled_tokens") if "recomputed" not in option.settings
    }
    assert options
    planned = tape_of(*SMALL, tuple(option.key for option in options.values()), "tiled_tokens")
    num_tiles = sum(option.settings["num_tiles"] for option in options.values())
    expected = len(options) * HostWork.TILED_CALL.value + num_tiles * HostWork.TILE.value
    assert in_python(planned) == pytest.approx(expected, rel=0.001)
    added = seconds_of(planned) - seconds_of(tape_of(*SMALL))
    assert added == pytest.approx(promised([*options.values()]), rel=0.1)
