"""A small training run in the usual ways, plain or with a technique, whose losses, gradients and parameters tests compare.

Also the same as a workload for the virtual GPU: `traced(...)` gives its tape.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tightfit.allocator.pools import MIN_BLOCK_BYTES
from tightfit.capture.trace_settings import TraceSettings
from tightfit.fit import capture
from tightfit.planner.option import Option
from tightfit.planner.plan import Choice
from tightfit.tape import EventKind, Tape
from tightfit.techniques.registry import _load
from tightfit.techniques.session import Session
from tightfit.techniques.technique import AbstractTechnique

DEVICE = "RTX 4090"

# The tensors are small: more threads than one cost more than they bring.
torch.set_num_threads(1)

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5),
}


class Tied(torch.nn.Module):
    """An embedding that is also the head, two blocks with dropout, and a frozen layer."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(17, width)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.Linear(width, 2 * width),
                torch.nn.GELU(),
                torch.nn.Dropout(0.1),
                torch.nn.Linear(2 * width, width),
            )
            for _ in range(2)
        )
        self.norm = torch.nn.LayerNorm(width)
        self.frozen = torch.nn.Linear(width, width).requires_grad_(False)
        self.head = torch.nn.Linear(width, 17, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.table(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(self.norm(self.frozen(hidden)))


@dataclasses.dataclass(slots=True, kw_only=True)
class Trained:
    """What a run leaves: losses by step, gradients by step and name, and the live objects."""

    losses: list[float]
    gradients: list[dict[str, torch.Tensor]]
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    session: Session

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The parameters by name, as they are now."""
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def choice(technique: str, where: str = "optimizer", **settings: Any) -> Choice:
    """A choice as a plan carries it."""
    return Choice(technique=technique, where=where, settings=settings, saves_bytes=0, adds_seconds=0.0, exact=True)


def train(
    technique: AbstractTechnique | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    optimizer: str = "adam",
    num_steps: int = 6,
    reload_at: int | None = None,
    max_norm: float | None = None,
    set_to_none: bool = True,
    where: str = "optimizer",
    watches_gradients: bool = True,
) -> Trained:
    """Trains `Tied` with a scheduler. At `reload_at` model and optimizer are loaded from what they have just saved.

    Gradients are watched by hooks of parameters, which a technique that runs backward passes twice must leave alone.
    """
    torch.manual_seed(0)
    model = Tied()
    stepper = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
    scheduler = torch.optim.lr_scheduler.StepLR(stepper, 2, 0.5)
    session = Session(model=model, optimizers=[stepper])
    if technique is not None:
        technique.apply(session, [choice(technique.name, where, **(settings or {}))])
    found: dict[str, torch.Tensor] = {}
    handles = [
        p.register_hook(lambda g, name=name: found.__setitem__(name, g.detach().clone()))
        for name, p in model.named_parameters()
        if p.requires_grad and watches_gradients
    ]
    losses, gradients = [], []
    for step in range(num_steps):
        torch.manual_seed(100 + step)
        tokens = torch.randint(17, (4, 9))
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1).flatten())
        loss.backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        stepper.step()
        scheduler.step()
        stepper.zero_grad(set_to_none=set_to_none)
        losses.append(loss.item())
        gradients.append(dict(found))
        if step == reload_at:
            saved = copy.deepcopy((model.state_dict(), stepper.state_dict()))
            model.load_state_dict(saved[0])
            stepper.load_state_dict(saved[1])
    for handle in handles:
        handle.remove()
    return Trained(losses=losses, gradients=gradients, model=model, optimizer=stepper, session=session)


def assert_same(plain: Trained, other: Trained, **tolerances: float) -> None:
    """Losses, all gradients of all steps, and the parameters: bit for bit, or within `rtol` and `atol`."""
    within = {"rtol": 0.0, "atol": 0.0, **tolerances}
    torch.testing.assert_close(torch.tensor(other.losses), torch.tensor(plain.losses), **within)
    for mine, theirs in zip(other.gradients, plain.gradients, strict=True):
        if not mine:
            continue
        torch.testing.assert_close(mine, theirs, **within)
    torch.testing.assert_close(other.parameters, plain.parameters, **within)


def workload(
    technique: str = "",
    settings: str = "",
    where: str = "optimizer",
    optimizer: str = "adamw",
    width: int = 512,
    num_blocks: int = 4,
    batch_size: int = 64,
    set_to_none: int = 1,
    max_norm: float = 0.0,
    averages: int = 0,
) -> Any:
    """A stack of feed-forward blocks, with `technique` (as `module:Class`) put on it before the first step; a generator."""
    blocks = [
        torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width))
        for _ in range(num_blocks)
    ]
    model = torch.nn.Sequential(*blocks).cuda()
    constructors: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    }
    stepper = constructors[optimizer](model.parameters())
    if technique:
        given = dict(pair.split(":") for pair in settings.split("+")) if settings else {}
        applied = _load(technique)
        applied.apply(Session(model=model, optimizers=[stepper], check_steps=0), [choice(applied.name, where, **given)])
    parameters = list(model.parameters())[len(list(model.parameters())) - averages :]
    averaged = [p.detach().clone() for p in parameters]
    while True:
        loss = model(torch.randn(batch_size, width, device="cuda")).square().mean()
        loss.backward()
        for average, parameter in zip(averaged, parameters, strict=True):
            average.lerp_(parameter.detach(), 0.1)
        if max_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        stepper.step()
        stepper.zero_grad(set_to_none=bool(set_to_none))
        yield loss


@functools.cache
def traced(*, num_steps: int = 2, **parameters: Any) -> Tape:
    """The tape of so many steps of `workload` with these parameters."""
    given = [f"{name}={value}" for name, value in parameters.items()]
    return capture(f"{__file__}:workload", device=DEVICE, parameters=given, tracing=TraceSettings(steps=num_steps))


def peak_bytes(tape: Tape, changed: Sequence[Option] = ()) -> int:
    """The most that is alive at once after any event, in allocator blocks, with the changes that options promise."""
    blocks = -(-tape.storages.num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
    sign = np.select([tape.events.kind == EventKind.ALLOCATE, tape.events.kind == EventKind.FREE], [1, -1], 0)
    alive = np.cumsum(sign * np.where(sign != 0, blocks[tape.events.storage], 0))
    for option in changed:
        for change in option.changes:
            alive[change.begin : change.end] += change.num_bytes
    return int(alive.max())
