"""What begins after the steps that are checked: counters in a context of decimal's or behind a made name, and a second backward pass for each step (SAM)."""

import decimal
import functools
from typing import Any

import torch
from tests.attacks.models import Block, Net, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch.nn import functional

LATE, STEPS = 3, 5
HITS = [0]


class _Clock:
    step = 0


def _tick(step: int) -> None:
    _Clock.step = step


def _call(holder: Any, name: str) -> int:
    return getattr(holder, name)()


@attack("recomputation", "from step 3 on a block counts in the precision of a decimal.Context of its own", only=EXACT)
def late_decimal_context(t: Trial) -> None:
    context = decimal.Context(prec=5)

    class Counting(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if _Clock.step >= LATE:
                context.prec += 1
            return super().forward(x * (1 + 0.01 * context.prec))

    train(t, Net([Counting(), Counting()]), num_steps=STEPS, before=_tick, after=lambda _: t.note("prec", context.prec))


@attack(
    "recomputation", "from step 3 on a helper outside of the block calls its method by a name that is made", only=EXACT
)
def late_made_name(t: Trial) -> None:
    HITS[0] = 0

    class Counting(Block):
        def count_it(self) -> int:
            HITS[0] += 1
            return HITS[0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hits = _call(self, "count" + "_it") if _Clock.step >= LATE else 0
            return super().forward(x * (1 + 0.05 * hits))

    train(t, Net([Counting(), Counting()]), num_steps=STEPS, before=_tick, after=lambda _: t.note("hits", HITS[0]))


@attack("gradients", "SAM begins at step 3: weights are moved between two backward passes and back before the step")
def sharpness_aware_later(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*tokens(step))
        loss.backward()
        if step >= LATE:
            moved = [p.grad * 0.05 for p in model.parameters()]
            with torch.no_grad():
                torch._foreach_add_(list(model.parameters()), moved)
            optimizer.zero_grad()
            model(*tokens(step)).backward()
            with torch.no_grad():
                torch._foreach_sub_(list(model.parameters()), moved)
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("parts", "from step 3 on a block counts its calls by a closure, and scales by how many there were", only=EXACT)
def late_closure_counter(t: Trial) -> None:
    calls = 0

    class Counting(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += _Clock.step >= LATE
            return super().forward(x * (1 + 0.05 * calls))

    train(t, Net([Counting(), Counting()]), num_steps=STEPS, before=_tick, after=lambda _: t.note("calls", calls))


@attack("parts", "the loss is chosen by the class of its targets (functools.singledispatch)", only=EXACT)
def loss_by_single_dispatch(t: Trial) -> None:
    @functools.singledispatch
    def loss_of(y: Any, logits: torch.Tensor) -> torch.Tensor:
        raise TypeError(type(y))

    @loss_of.register
    def _(y: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    class Chosen(Net):
        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return loss_of(y, logits)

    train(t, Chosen())
