"""Trains small models on the host, plain and with choices on them, and traces workloads on the virtual GPU plain and with options on them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tightfit.allocator.settings import AllocatorSettings
from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.capture.trace import Preparation, trace
from tightfit.devices.catalogue import find
from tightfit.planner import problem as problems
from tightfit.planner.option import Option
from tightfit.planner.plan import Choice
from tightfit.runtime.apply import apply_choices
from tightfit.simulate.timeline_bytes import replay_timeline
from tightfit.simulate.workspaces import with_workspaces_of
from tightfit.tape import Tape

DEVICE = "RTX 4090"
Loss = Callable[[torch.nn.Module, int], torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a run leaves, by step and by name."""

    losses: list[float]
    gradients: list[dict[str, torch.Tensor]]
    state: dict[str, torch.Tensor]


def choice(technique: str, where: str, **settings: Any) -> Choice:
    """A choice as a plan carries it."""
    return Choice(technique=technique, where=where, settings=settings, saves_bytes=0, adds_seconds=0.0, exact=True)


def train(
    make: Callable[[], torch.nn.Module], loss_of: Loss, choices: Sequence[Choice] = (), num_steps: int = 3
) -> Trained:
    """Some steps of SGD with momentum, from the same beginning every time."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses, gradients = [], []
    with apply_choices(choices, model, [optimizer]):
        for step in range(num_steps):
            torch.manual_seed(100 + step)
            loss = loss_of(model, step)
            loss.backward()
            losses.append(loss.item())
            gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
            optimizer.step()
            optimizer.zero_grad()
    return Trained(losses=losses, gradients=gradients, state=dict(model.state_dict()))


def assert_same(plain: Trained, other: Trained, **tolerances: float) -> None:
    """Losses, all gradients of all steps, parameters and buffers: bit for bit, or within `rtol` and `atol`."""
    within = {"rtol": 0.0, "atol": 0.0, **tolerances}
    torch.testing.assert_close(torch.tensor(other.losses), torch.tensor(plain.losses), **within)
    for mine, theirs in zip(other.gradients, plain.gradients, strict=True):
        torch.testing.assert_close(mine, theirs, **within)
    torch.testing.assert_close(other.state, plain.state, **within)


def traced(file: str, function: str, options: Sequence[Option] = (), **parameters: Any) -> Tape:
    """The tape of two steps of a workload, with options on it."""
    plain = [choice(option.technique, option.where, **option.settings) for option in options]
    return trace(
        GeneratorFunction(location=file, function=function, parameters=parameters),
        label=function,
        device=DEVICE,
        num_steps=2,
        preparation=Preparation(
            function="tightfit.runtime.attach:prepare", argument={"choices": [dataclasses.asdict(c) for c in plain]}
        ),
    ).tape


def timeline(tape: Tape) -> Any:
    """What is allocated after each event."""
    return replay_timeline(with_workspaces_of(find(DEVICE), tape), AllocatorSettings()).allocated


def promised_peak(tape: Tape, options: Sequence[Option]) -> int:
    """The peak that options promise on the plain run `tape`."""
    problem = problems.build(timeline(tape), options)
    return problem.peak_bytes(range(len(problem.options)))


class Counting(TorchDispatchMode):
    """Counts how often an operator runs: what a hook of the user's counts is put back after a second run."""

    def __init__(self, operator):
        super().__init__()
        self.operator = operator
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is self.operator
        return func(*args, **(kwargs or {}))
