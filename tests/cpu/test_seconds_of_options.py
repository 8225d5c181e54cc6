"""Steps that wait for their host: what options are predicted to add together is what the step takes when it is traced with them."""

import functools
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from tightfit.fit.planning import planner
from tightfit.fit.traced_runs import TracedRuns
from tightfit.planner.option import Option
from tightfit.planner.problem import together
from tightfit.techniques.registry import technique

# Many traces, of which each commit tries a half.
pytestmark = pytest.mark.by_turns(2)

MODELS = Path(__file__).with_name("host_bound_models.py")
OFF = 0.1


@functools.cache
def runs_of(model: str, device: str) -> TracedRuns:
    return planner(f"{MODELS}:{model}", device, host="64GiB").runs


@functools.cache
def options_of(model: str, device: str, name: str) -> tuple[Option, ...]:
    options = technique(name).options(runs_of(model, device).run_with(()).profile)
    return tuple(o for o in options if not o.needs_new_trace and not o.disk_bytes)


def compatible(options: Iterable[Option]) -> list[Option]:
    """As many as go together, in order."""
    taken: list[Option] = []
    for option in options:
        if not any(option.slots & other.slots for other in taken):
            taken.append(option)
    return taken


def is_right(model: str, device: str, chosen: Sequence[Option]) -> None:
    runs = runs_of(model, device)
    plain = runs.run_with(())
    predicted = plain.seconds + plain.profile.step.added(together(chosen))
    assert chosen and predicted == pytest.approx(runs.run_with(chosen).seconds, rel=OFF)


@pytest.mark.by_turns(2)
@pytest.mark.parametrize(
    ("model", "device", "name"),
    [
        ("mixer", "RTX 4060", "sequential_checkpointing"),
        ("mixer", "RTX 4060", "checkpointing"),
        ("mixer", "RTX 4060", "update_in_backward"),
        ("mixer", "RTX 4060", "activation_offload"),
        ("mixer", "RTX 4060", "offloaded_checkpointing"),
        ("residual_net", "L4", "checkpointing"),
        ("residual_net", "L4", "sequential_checkpointing"),
        ("language_model", "RTX 4090", "checkpointing"),
        ("language_model", "RTX 4090", "selective_checkpointing"),
        ("language_model", "RTX 4090", "nested_checkpointing"),
        ("language_model", "RTX 4090", "tiled_tokens"),
        ("language_model", "RTX 4090", "chunked_loss"),
        ("language_model", "RTX 4090", "optimizer_kernel"),
        ("language_model", "RTX 4090", "trained_weight_streaming"),
        ("convolutions", "T4", "sequential_checkpointing"),
    ],
)
def test_all_of_a_technique(model: str, device: str, name: str) -> None:
    options = options_of(model, device, name)
    # The last first: those of inner modules come after those around them.
    is_right(model, device, compatible(reversed(options)))


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("name", ["low_bit_states", "factored_states", "optimizer_offload"])
@pytest.mark.parametrize("first", [0, 1])
def test_every_second_way_of_an_optimizer(name: str, first: int) -> None:
    options = options_of("language_model", "RTX 4090", name)
    assert len(options) >= 3
    for option in options[first::2]:
        is_right("language_model", "RTX 4090", [option])


@pytest.mark.parametrize("num_parts", [2, 4])
def test_parts_of_a_batch(num_parts: int) -> None:
    options = technique("micro_batches").options(runs_of("language_model", "RTX 4090").run_with(()).profile)
    is_right("language_model", "RTX 4090", [o for o in options if o.settings["num_parts"] == num_parts])


def test_options_of_several_techniques_and_of_blocks_that_differ() -> None:
    model, device = "mixer", "RTX 4060"
    chosen = [
        *options_of(model, device, "sequential_checkpointing")[3:5],
        *options_of(model, device, "selective_checkpointing"),
        *options_of(model, device, "optimizer_kernel"),
    ]
    is_right(model, device, compatible(chosen))


def test_what_the_host_has_to_spare_is_there_once() -> None:
    """A step that waits for its card hides the Python of one recomputed segment, and not that of many."""
    model, device = "mixer", "RTX 4060"
    step = runs_of(model, device).run_with(()).profile.step
    chosen = compatible(options_of(model, device, "sequential_checkpointing")[::-1])
    assert step.on_card > step.on_host and len(chosen) > 4
    added = [step.added(together(chosen[:count])) for count in range(len(chosen) + 1)]
    assert step.added(together(chosen)) > 1.5 * sum(option.seconds for option in chosen)
    # The longer the host works already, the more the next one adds.
    more = [after - before for before, after in itertools.pairwise(added)]
    assert all(later >= earlier - 1e-4 for earlier, later in itertools.pairwise(more))


@pytest.mark.parametrize("share", [0.85, 0.7])
def test_the_seconds_of_a_plan_are_those_of_its_trace(share: float) -> None:
    made = planner(f"{MODELS}:mixer", "RTX 4060", prove=False)
    plain = made.runs.run_with(())
    context = plain.estimate.peak.device_bytes - plain.estimate.peak.allocated_bytes
    plan = made.within(round(context + share * plain.estimate.peak.allocated_bytes))
    assert plan.fits and plan.choices
    assert plan.predicted_seconds == pytest.approx(plan.run.seconds_per_step, rel=OFF)
