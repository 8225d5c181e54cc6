"""Trains one of the models on the host, with or without choices on it, and keeps what it found: losses, gradients, parameters, buffers."""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from tests.conformance.models import MODELS, ZEROING

from tightfit.planner.option import Option
from tightfit.planner.plan import Choice
from tightfit.runtime.apply import apply_choices


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """What a training loop does besides. It `doubles` where all is float64, in which many steps of rounding are told from a fault."""

    clips: bool = False
    accumulates: int = 1
    schedules: bool = False
    scales: bool = False
    reloads_at: int | None = None
    evaluates: bool = False
    doubles: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`gradients` of each step, as the optimizer saw them; empty where they are used up before it. Losses of evaluations are among `losses`."""

    losses: list[float]
    gradients: list[dict[str, torch.Tensor]]
    state: dict[str, torch.Tensor]


def choice_of(option: Option) -> Choice:
    """The option as a plan has it."""
    return Choice(
        technique=option.technique,
        where=option.where,
        settings=option.settings,
        saves_bytes=0,
        adds_seconds=option.seconds,
        exact=option.exact,
    )


def train(name: str, options: Sequence[Option], *, num_steps: int, habits: Habits) -> Outcome:
    """`num_steps` steps of the model `name` with `options` on it, from the same beginning every time."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if habits.doubles else default)
    try:
        return _train(name, options, num_steps, habits)
    finally:
        torch.set_default_dtype(default)


def _train(name: str, options: Sequence[Option], num_steps: int, habits: Habits) -> Outcome:
    torch.manual_seed(0)
    model, loss_of = MODELS[name]("cpu")
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", enabled=habits.scales)
    losses, gradients = [], []
    session = apply_choices([choice_of(o) for o in options], model, [optimizer])
    for step in range(num_steps):
        torch.manual_seed(step)  # dropout
        for part in range(habits.accumulates):
            loss = loss_of(step * habits.accumulates + part) / habits.accumulates
            scaler.scale(loss).backward()
        if habits.clips:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        losses.append(loss.item())
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        scaler.step(optimizer)
        scaler.update()
        if habits.schedules:
            scheduler.step()
        optimizer.zero_grad(set_to_none=name not in ZEROING)
        if habits.reloads_at == step:
            _reload(model, optimizer)
        if habits.evaluates:
            losses.append(_evaluated(model, loss_of, step))
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    session.undo()
    return Outcome(losses=losses, gradients=gradients, state=state)


def _evaluated(model: torch.nn.Module, loss_of: Callable[[int], torch.Tensor], step: int) -> float:
    """The loss in inference mode, whose tensors have no versions and no gradients."""
    model.eval()
    with torch.inference_mode():
        loss = loss_of(step)
    model.train()
    return loss.item()


def _reload(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Saves and resumes, in place."""
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    states = optimizer.state_dict()
    model.load_state_dict(saved)
    optimizer.load_state_dict(states)
