"""Trainings whose guard has a ladder of plans, with out-of-memory errors injected at operators: for the tests of `guard` with plans."""

import contextlib
import copy
import dataclasses
import random
from collections import Counter
from collections.abc import Sequence

import torch
from benchmarks.guard import Failing
from tests.attacks.models import Images, Net, images, tokens
from tests.attacks.places import VARIANTS, freeze

import tightfit
from tightfit.planner.plan import Plan
from tightfit.runtime.apply import apply
from tightfit.techniques.session import Session

from tests.cpu.applied import plan_of  # isort: skip

NUM_STEPS = 8


class Training:
    """A loop in which the techniques of `variants` have a place: with a scheduler, a scaler, a moving average, accumulation or two optimizers, as `kind` says."""

    def __init__(self, variants: Sequence[str], kind: str = "plain") -> None:
        torch.manual_seed(0)
        random.seed(0)
        of_images = any(VARIANTS[each].technique == "tiled_convolutions" for each in variants)
        batch = images if of_images else tokens
        self.batches = [batch(number) for number in range(NUM_STEPS)]
        self.model: torch.nn.Module = Images() if of_images else Net()
        if any(VARIANTS[each].freezes for each in variants):
            freeze(self.model)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        parts = [trained[:3], trained[3:]] if kind == "two optimizers" else [trained]
        self.optimizers = [torch.optim.AdamW(part, lr=1e-2, foreach=True) for part in parts]
        self.schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in self.optimizers]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2, enabled=kind == "scaled")
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        self.plans: list[Plan] = [
            plan_of(VARIANTS[each].find(self.model, self.optimizers), roots=[]) for each in variants
        ]
        self._clips = any(each.endswith("clips") for each in variants)
        self._kind = kind
        self._num_parts = 2 if kind == "accumulated" else 1

    def step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """One step; the sum of its losses."""
        total = torch.zeros(())
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for part in zip(*(each.chunk(self._num_parts) for each in batch), strict=True):
            loss = self.model(*part)
            self.scaler.scale(loss).backward()
            total += loss.detach()
        if self._clips:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            self.scaler.step(optimizer)
            scheduler.step()
        self.scaler.update()
        if self._kind == "averaged":
            with torch.no_grad():
                for slow, fast in zip(self.average.parameters(), self.model.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
        return total

    def result(self, losses: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Losses, weights, states, rates, the scale and the random state."""
        states = [each.state_dict()["state"] for each in self.optimizers]
        values = [v for of in states for state in of.values() for _, v in sorted(state.items())]
        settings = [
            *(g["lr"] for o in self.optimizers for g in o.param_groups),
            self.scaler.get_scale(),
            random.random(),
        ]
        return [
            *losses,
            *self.model.state_dict().values(),
            *self.average.state_dict().values(),
            *(value for value in values if isinstance(value, torch.Tensor)),
            torch.tensor(settings),
            torch.get_rng_state(),
        ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a run ended; `plans` are those that each step came to its end with."""

    values: list[torch.Tensor]
    plans: list[int]
    num_operators: int
    num_failures: int
    statistics: Counter[str]


def plain(variants: Sequence[str], kind: str = "plain") -> Ended:
    """Without a guard."""
    training = Training(variants, kind)
    with Failing() as failing, failing.counting():
        losses = [training.step(batch) for batch in training.batches]
    return Ended(
        values=training.result(losses),
        plans=[-1] * NUM_STEPS,
        num_operators=failing.num_operators,
        num_failures=0,
        statistics=Counter(),
    )


def guarded(variants: Sequence[str], numbers: Sequence[int], kind: str = "plain", *, everywhere: bool = False) -> Ended:
    """With a ladder of one plan for each of `variants`; the operators of these numbers fail, those of the steps, or `everywhere` also the guard's own."""
    training, failing, plans = Training(variants, kind), Failing(*numbers), list[int]()
    losses: list[torch.Tensor] = []
    with tightfit.guard(training.model, training.optimizers, plans=training.plans, calm_steps=2) as guard, failing:

        def step(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            # Taken back with the step: what stays is of the attempt that came to its end.
            plans.append(guard.plan_in_use)
            with contextlib.nullcontext() if everywhere else failing.counting():
                return training.step(batch)

        for batch in training.batches:
            with failing.counting() if everywhere else contextlib.nullcontext():
                losses.append(guard.step(step, batch))
    return Ended(
        values=training.result(losses),
        plans=plans,
        num_operators=failing.num_operators,
        num_failures=failing.num_failures,
        statistics=guard.statistics,
    )


def by_hand(variants: Sequence[str], plans: Sequence[int], kind: str = "plain") -> Ended:
    """Without a guard and without errors: each step with the plan at the position that `plans` has for it."""
    training, losses, at = Training(variants, kind), [], -1
    session: Session | None = None
    for position, batch in zip(plans, training.batches, strict=True):
        if position != at:
            if session is not None:
                session.undo()
            at = position
            session = None if at < 0 else apply(training.plans[at], training.model, training.optimizers)
        losses.append(training.step(batch))
    if session is not None:
        session.undo()
    return Ended(
        values=training.result(losses), plans=list(plans), num_operators=0, num_failures=0, statistics=Counter()
    )


def is_same(one: Ended, other: Ended) -> bool:
    """Whether all values are the same to the bit."""
    return len(one.values) == len(other.values) and all(map(torch.equal, one.values, other.values))


def is_close(one: Ended, other: Ended) -> bool:
    """Whether they are the same up to the order of sums."""
    return all(
        torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-5)
        for a, b in zip(one.values, other.values, strict=True)
    )
