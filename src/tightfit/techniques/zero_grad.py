"""Gradients are freed where a script only fills them with zeros: between the two nothing is gained by holding them.

`zero_grad(set_to_none=False)`, and torch before 2.0 by default, keep every gradient through the next forward pass, and the next backward
pass makes new ones to add to them. torch's own documentation says what differs: a parameter without gradient is skipped by an optimizer, one with
a gradient of zeros is not. So a parameter that had a gradient and gets none in a step is given zeros just before the step.
"""

import copy
from collections.abc import Iterable, Sequence
from typing import Any, final

import numpy as np
import torch

from tightfit.devices.device import Device
from tightfit.planner.option import Option
from tightfit.tape import Category, Column, Phase, SpanKind, Tape
from tightfit.techniques.optimizer_tape import OptimizerTape, changes, levels, runs_of
from tightfit.techniques.session import Session
from tightfit.techniques.technique import AbstractTechnique, Choice

_ZEROING = ("aten.zero_", "aten._foreach_zero_")


@final
class ZeroGrad(AbstractTechnique):
    """Trades nothing: has `zero_grad` free gradients, whatever the script asked for."""

    name = "zero_grad"
    exact = True
    exactness = "bit for bit, but that a gradient may be -0.0 where it was 0.0: a new gradient takes the place of zeros that it is added to"
    tolerance = 0.15

    def options(self, tape: Tape, device: Device) -> Iterable[Option]:
        """One where gradients are zeroed and kept."""
        run = OptimizerTape(tape, device)
        kept = _kept(run)
        zeroing = _zeroing(tape)
        if not len(kept) or not len(zeroing):
            return []
        num_zeroed = len(zeroing) / run.num_steps
        zeroed_bytes = int(run.block_bytes[kept].sum())
        # Zeros are written, and read, added to and written again together with each new gradient.
        seconds = run.seconds_of_update(zeroed_bytes, round(num_zeroed)) + run.seconds_of_update(
            3 * zeroed_bytes, len(kept)
        )
        stretches = [s for begin, end in _gaps(run, zeroing) for s in _until_made_again(run, kept, begin, end)]
        return [
            Option(
                technique=self.name,
                where="gradients",
                changes=changes(stretches, -1.0),
                seconds=-seconds,
                exact=self.exact,
                slots=frozenset({"zero_grad"}),
            )
        ]

    def apply(self, session: Session, chosen: Sequence[Choice]) -> None:
        """Puts a `zero_grad` that frees on the model and on every optimizer."""
        absents = [_Absent(optimizer) for optimizer in session.optimizers]
        for optimizer, absent in zip(session.optimizers, absents, strict=True):
            session.set(optimizer, "zero_grad", absent.free)
            session.when_undone(optimizer.register_step_pre_hook(absent.before_step).remove)
        session.set(session.model, "zero_grad", _FreeingModule(session.model, absents))


class _Absent:
    """The gradients of one optimizer that were freed in place of being zeroed."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._had: dict[torch.Tensor, None] = {}

    def note(self, *, are_zeroed: bool) -> None:
        """Remembers which parameters have a gradient that would have become zeros; those that would have been freed are nothing to remember."""
        if not are_zeroed:
            self._had.clear()
            return
        self._had.update((p, None) for g in self._optimizer.param_groups for p in g["params"] if p.grad is not None)

    def free(self, set_to_none: bool = True) -> None:
        """In place of `Optimizer.zero_grad`."""
        self.note(are_zeroed=not set_to_none)
        type(self._optimizer).zero_grad(self._optimizer, set_to_none=True)

    def before_step(self, _: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Fills before the step, or after the closure that it calls first."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self.fill()
            return None

        def closure_and_fill() -> Any:
            loss = closure()
            self.fill()
            return loss

        return (args[0],), {"closure": closure_and_fill}

    def fill(self) -> None:
        """Gives zeros to what had a gradient and got none."""
        for parameter in self._had:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


class _FreeingModule:
    """In place of `Module.zero_grad`; a copy or a pickle of the model has its own."""

    def __init__(self, module: torch.nn.Module, absents: Sequence[_Absent]) -> None:
        self._module = module
        self._absents = tuple(absents)

    def __call__(self, set_to_none: bool = True) -> None:
        for absent in self._absents:
            absent.note(are_zeroed=not set_to_none)
        type(self._module).zero_grad(self._module, set_to_none=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_FreeingModule":
        return _FreeingModule(copy.deepcopy(self._module, memo), ())

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "zero_grad")


def _kept(run: OptimizerTape) -> Column:
    """The gradients that live on from one step to the next."""
    spans = run.tape.spans
    ends = spans.end[spans.kind == SpanKind.STEP]
    gradients = run.tape.storages.category == Category.GRADIENTS
    if not len(ends):
        return np.zeros(0, dtype=np.int64)
    return np.flatnonzero(gradients & (run.born < ends[0]) & (run.died > ends[0]))


def _zeroing(tape: Tape) -> Column:
    """The operators that fill gradients with zeros: outside of all passes."""
    names = [i for i, text in enumerate(tape.strings) if text.startswith(_ZEROING)]
    return np.flatnonzero(np.isin(tape.operators.name, names) & (tape.operators.phase == Phase.OTHER))


def _gaps(run: OptimizerTape, zeroing: Column) -> list[tuple[int, int]]:
    """From each round of zeroing to the backward pass that comes next, as (operator, operator); the end of the tape where none comes."""
    passes = runs_of(run.tape.operators.phase == Phase.BACKWARD)
    found, previous_end = [], 0
    for begin, end in [*passes, (len(run.tape.operators),) * 2]:
        since = zeroing[(zeroing >= previous_end) & (zeroing < begin)]
        if len(since):
            found.append((int(since[0]), begin))
        previous_end = end
    return found


def _until_made_again(run: OptimizerTape, kept: Column, begin: int, back: int) -> list[tuple[int, int, int]]:
    """Stretches of events from the zeroing to where each gradient comes again: as far into the backward pass as in the first one."""
    passes = runs_of(run.tape.operators.phase == Phase.BACKWARD)
    starts = dict(passes)
    first, first_end = passes[0]
    ((begin_event, back_event),) = run.events_of([(begin, back)])
    if back not in starts:
        return levels(np.full(len(kept), begin_event), np.full(len(kept), back_event), run.block_bytes[kept])
    ((first_event, first_end_event), (_, end_event)) = run.events_of([(first, first_end), (back, starts[back])])
    share = (run.born[kept] - first_event) / max(1, first_end_event - first_event)
    again = back_event + np.clip(share, 0.0, 1.0) * (end_event - back_event)
    return levels(np.full(len(kept), begin_event), again.astype(np.int64), run.block_bytes[kept])
