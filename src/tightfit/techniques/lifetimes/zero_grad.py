"""Frees gradients that a script only fills with zeros: from then to the next backward pass they need no memory.

`zero_grad(set_to_none=False)`, and torch before 2.0 by default, keep every gradient through the next forward pass, and the next backward
pass allocates new ones to add to them. A lazy gradient of zeros takes its place: it takes memory only once it is read, added to or stepped with.
A gradient that something else refers to is filled in place.
"""

import functools
import sys
import weakref
from collections.abc import Container, Iterable, Sequence
from typing import Any, final

import numpy as np
import torch

from tightfit.analysis.intervals import changes, levels, runs_of
from tightfit.analysis.optimizer import OptimizerProfile, events_of, seconds_of_update
from tightfit.analysis.profile import Profile
from tightfit.planner.option import Option
from tightfit.tape import Category, Column, Phase, SpanKind, Tape
from tightfit.techniques.lazy_tensors.deferred_gradients import Deferred, deferred_gradient, settle
from tightfit.techniques.lazy_tensors.lazy_tensor import LazyTensor
from tightfit.techniques.lazy_tensors.retained_graphs import told_of_gradients
from tightfit.techniques.optimizer.optimizer_steps import update_within_step
from tightfit.techniques.session import Session
from tightfit.techniques.technique import AbstractTechnique, Choice
from tightfit.torch_hooks.backward import BackwardPass, on_backward
from tightfit.torch_hooks.manifest import STORAGE_USES

# References to a gradient that only its parameter keeps, while `_is_shared` runs: the parameter, two names and
# an argument; and to its storage: the gradient and a name.
_OWN_REFERENCES = 4
_OWN_USES = 2
_ZEROING = ("aten.zero_", "aten._foreach_zero_")


@final
class ZeroGrad(AbstractTechnique):
    """Costs nothing: `zero_grad` frees gradients, whatever its arguments."""

    name = "zero_grad"
    exact = True
    exactness = "bit for bit"
    tolerance = 0.15

    def options(self, profile: Profile) -> Iterable[Option]:
        """One option if gradients are filled with zeros and kept."""
        run = profile.optimizer
        kept = _kept(run)
        zeroing = _zeroing(profile.tape)
        if not len(kept) or not len(zeroing):
            return []
        num_zeroed = len(zeroing) / run.num_steps
        zeroed_bytes = int(run.block_bytes[kept].sum())
        # Zeros are written, and read, added to and written again together with each new gradient.
        seconds = seconds_of_update(run, zeroed_bytes, round(num_zeroed)) + seconds_of_update(
            run, 3 * zeroed_bytes, len(kept)
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
        """Replaces `zero_grad` of the model and of every optimizer."""
        freed = _Freed()
        for optimizer in session.optimizers:
            # On the object and weakly, so that the optimizer does not become part of a reference cycle and is
            # freed when the program drops it.
            session.set(optimizer, "zero_grad", functools.partial(_zero_optimizer, weakref.ref(optimizer), freed))
            # Whatever the script did not call `zero_grad` for is there when torch's loop comes.
            update_within_step(session, optimizer, functools.partial(_settle, weakref.ref(optimizer)))
        session.set(session.model, "zero_grad", functools.partial(_zero_module, weakref.ref(session.model), freed))
        leave = on_backward(freed)

        def end() -> None:
            leave()
            freed.end()

        session.when_undone(end)


class _Freed:
    """The parameters whose gradients were freed instead of filled with zeros, and have lazy gradients of zeros."""

    def __init__(self) -> None:
        self._zeroed: dict[torch.Tensor, None] = {}

    def zero(self, parameters: Iterable[torch.Tensor]) -> None:
        """Replaces the gradients of these parameters by lazy zeros."""
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            deferred = deferred_gradient(parameter)
            if deferred is not None or _is_shared(gradient):
                # A lazy gradient handles `zero_` itself; a view of the script's own buffer is filled in place.
                with torch.no_grad():
                    gradient.detach_() if gradient.grad_fn is not None else gradient.requires_grad_(False)
                    gradient.zero_()
                continue
            Deferred.zeros(gradient).put(parameter)
            self._zeroed[parameter] = None

    def concerned_parameters(self) -> Container[torch.Tensor]:
        """As `tightfit.torch_hooks.backward.BackwardOwner`."""
        return self._zeroed

    def around_backward(self, backward: BackwardPass) -> Any:
        """New gradients replace the zeros; a parameter that gets none keeps its zeros."""
        if not backward.accumulates:
            return backward.run()
        standing = {}
        for parameter in backward.leaves():
            deferred = deferred_gradient(parameter) if parameter in self._zeroed else None
            if deferred is not None and deferred.state == "zero":
                standing[parameter], parameter.grad = parameter.grad, None
        try:
            # A gradient with a graph must not be changed in place: it stays as the engine made it.
            with told_of_gradients(() if backward.creates_graph else standing, _add_to_zeros):
                return backward.run()
        finally:
            for parameter, zeros in standing.items():
                if parameter.grad is None:
                    parameter.grad = zeros

    def end(self) -> None:
        """Materialises the zeros."""
        for parameter in self._zeroed:
            if (deferred := deferred_gradient(parameter)) is not None and deferred.state == "zero":
                deferred.whole()
                settle(parameter)
        self._zeroed.clear()


def _add_to_zeros(parameter: torch.Tensor) -> None:
    """Adds zero: negative zeros become positive ones, as in an addition to a gradient of zeros."""
    if parameter.grad is not None and parameter.grad.layout == torch.strided:
        parameter.grad.add_(0.0)


def _is_shared(gradient: torch.Tensor) -> bool:
    """Whether anything but the parameter refers to this memory: it is a view or has one, or the program keeps the tensor."""
    if gradient.layout != torch.strided or isinstance(gradient, LazyTensor):
        return True
    storage = gradient.untyped_storage()
    uses = STORAGE_USES.value()(storage._cdata)
    return gradient._is_view() or uses > _OWN_USES or sys.getrefcount(gradient) > _OWN_REFERENCES


def _settle(known: "weakref.ref[torch.optim.Optimizer]") -> tuple[()]:
    """Materialises, within a step, zeros that no backward pass has replaced."""
    optimizer = known()
    for group in optimizer.param_groups if optimizer is not None else ():
        for parameter in group["params"]:
            deferred = deferred_gradient(parameter)
            if deferred is not None and deferred.state == "zero":
                deferred.whole()
            settle(parameter)
    return ()


def _zero_optimizer(known: "weakref.ref[torch.optim.Optimizer]", freed: _Freed, set_to_none: bool = True) -> None:
    """Replaces `Optimizer.zero_grad`."""
    optimizer = known()
    assert optimizer is not None
    if set_to_none:
        type(optimizer).zero_grad(optimizer)
    else:
        freed.zero(p for group in optimizer.param_groups for p in group["params"])


def _zero_module(known: "weakref.ref[torch.nn.Module]", freed: _Freed, set_to_none: bool = True) -> None:
    """Replaces `Module.zero_grad`."""
    module = known()
    assert module is not None
    if set_to_none:
        type(module).zero_grad(module)
    else:
        freed.zero(module.parameters())


def _kept(run: OptimizerProfile) -> Column:
    """The gradients that stay allocated from one step to the next."""
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


def _gaps(run: OptimizerProfile, zeroing: Column) -> list[tuple[int, int]]:
    """From each round of zeroing to the backward pass that comes next, as (operator, operator); the end of the tape where none comes."""
    passes = runs_of(run.tape.operators.phase == Phase.BACKWARD)
    found, previous_end = [], 0
    for begin, end in [*passes, (len(run.tape.operators),) * 2]:
        since = zeroing[(zeroing >= previous_end) & (zeroing < begin)]
        if len(since):
            found.append((int(since[0]), begin))
        previous_end = end
    return found


def _until_made_again(run: OptimizerProfile, kept: Column, begin: int, back: int) -> list[tuple[int, int, int]]:
    """Ranges of events from the zeroing to where each gradient is made again: as far into the backward pass as in the first one."""
    passes = runs_of(run.tape.operators.phase == Phase.BACKWARD)
    starts = dict(passes)
    first, first_end = passes[0]
    ((begin_event, back_event),) = events_of(run, [(begin, back)])
    if back not in starts:
        return levels(np.full(len(kept), begin_event), np.full(len(kept), back_event), run.block_bytes[kept])
    ((first_event, first_end_event), (_, end_event)) = events_of(run, [(first, first_end), (back, starts[back])])
    share = (run.born[kept] - first_event) / max(1, first_end_event - first_event)
    again = back_event + np.clip(share, 0.0, 1.0) * (end_event - back_event)
    return levels(np.full(len(kept), begin_event), again.astype(np.int64), run.block_bytes[kept])
