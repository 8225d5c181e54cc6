"""Watches reads and writes of gradients outside of backward passes, optimizer steps, and torch's own clipping and zeroing.

`Tensor.grad` is looked up through a property of ours in the tracing process alone, so that a line that only asks whether there is a gradient is
seen as well. Reads in torch's own files and in an optimizer's step are known to the techniques, and are not noted.
"""

import sys
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from tightfit.capture.observe.attribution import is_users_or_other, user_line
from tightfit.capture.replace import replace
from tightfit.capture.steps.effects.lines import line_of_function
from tightfit.capture.steps.effects.looks_at_gradients import is_compared_with_none, is_only_a_look
from tightfit.effects.bytecode.instructions import instructions_of
from tightfit.errors.faults import hands_over
from tightfit.tape import Effect, EffectKind

_ZEROING = frozenset({"zero_", "detach_", "requires_grad_"})


class _Turn:
    """The backward passes that one optimizer's gradients have seen since its last step."""

    def __init__(self) -> None:
        self.num_backwards = 0
        self.others: list[str] = []


class GradientWatch:
    """The effects of a program on its gradients. `is_in_step` says whether an optimizer is stepping, which may read any gradient."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], is_in_step: Callable[[], bool]) -> None:
        self._optimizers = optimizers
        self._is_in_step = is_in_step
        self._turns: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Turn] = weakref.WeakKeyDictionary()
        self._found: dict[Effect, None] = {}
        self._is_library: dict[str, bool] = {}

    def install(self) -> None:
        """Patches `Tensor.grad` and `Optimizer.zero_grad`."""
        # torch lists the getter when it is first asked, and the compiler of torch 2.11 is not imported where that is one of ours.
        torch.overrides.get_default_nowrap_functions()
        plain: Any = torch.Tensor.grad
        watch = self

        @hands_over
        def get(tensor: torch.Tensor) -> torch.Tensor | None:
            gradient = plain.__get__(tensor)
            if gradient is not None:
                watch._touched(tensor, sys._getframe(1), "reads")
            return gradient

        @hands_over
        def put(tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
            # Setting None where no optimizer waits for a gradient is zeroing by hand, as
            # `zero_grad(set_to_none=True)` does.
            if gradient is not None or watch._is_awaited(tensor):
                watch._touched(tensor, sys._getframe(1), "sets")
            plain.__set__(tensor, gradient)

        replace(torch.Tensor, grad=property(get, put, plain.__delete__))
        zero_grad = torch.optim.Optimizer.zero_grad

        @hands_over
        def zeroed(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            turn = self._turns.get(optimizer)
            if turn is not None and turn.num_backwards and not self._is_in_step():
                self._note(EffectKind.DROPPED, "drops gradients that no step has used", user_line())
            self._turns.pop(optimizer, None)
            zero_grad(optimizer, *args, **kwargs)

        replace(torch.optim.Optimizer, zero_grad=zeroed)

    def backward(self, leaves: Iterable[torch.Tensor], *, create_graph: bool, accumulates: bool) -> None:
        """A backward pass begins whose graph has these leaves."""
        reached = {id(leaf) for leaf in leaves}
        for optimizer in self._optimizers:
            held = [p for group in optimizer.param_groups for p in group["params"]]
            is_reached = any(id(parameter) in reached for parameter in held)
            turn = self._turns.setdefault(optimizer, _Turn())
            if is_reached and create_graph:
                self._note(EffectKind.BACKWARD, "differentiates gradients (create_graph=True)", user_line())
            if is_reached and accumulates:
                turn.num_backwards += 1
                for hook in (h for p in held for h in (getattr(p, "_post_accumulate_grad_hooks", None) or {}).values()):
                    line = line_of_function(hook)
                    if line:
                        what = "has a hook of a parameter that waits for its gradient"
                        self._note(EffectKind.GRADIENT_HOOK, what, line)
                # Accumulation over several passes: a technique that updates in the backward pass cannot know
                # which pass is the last one before the step.
                if turn.num_backwards > 1:
                    self._note(EffectKind.BACKWARD, "runs several backward passes for one step", user_line())
            # A pass that does not reach this optimizer's parameters, between its own pass and its step: GANs
            # and actor-critic loops have these.
            elif turn.num_backwards:
                turn.others.append(user_line())

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""
        hooks = (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values())
        hooks += (
            *_global_optimizer_pre_hooks.values(),
            *_global_optimizer_post_hooks.values(),
        )
        for hook in hooks:
            line = line_of_function(hook)
            if line:
                self._note(EffectKind.STEP_HOOK, f"has a hook of {type(optimizer).__name__}.step", line)
        turn = self._turns.pop(optimizer, None)
        for line in turn.others if turn is not None else ():
            what = f"runs another backward pass between that of {type(optimizer).__name__} and its step"
            self._note(EffectKind.BACKWARD, what, line)

    def effects(self) -> Iterable[Effect]:
        """All effects that were observed."""
        return tuple(self._found)

    def _is_awaited(self, tensor: torch.Tensor) -> bool:
        """Whether an optimizer has not used the gradient of `tensor` yet."""
        return any(
            turn.num_backwards and any(p is tensor for group in optimizer.param_groups for p in group["params"])
            for optimizer, turn in self._turns.items()
        )

    def _touched(self, tensor: torch.Tensor, frame: FrameType, how: str) -> None:
        file = frame.f_code.co_filename
        is_library = self._is_library.get(file)
        if is_library is None:
            is_library = self._is_library[file] = not is_users_or_other(file)
        if is_library or self._is_in_step():
            return
        if not any(p is tensor for o in self._optimizers for group in o.param_groups for p in group["params"]):
            return
        # `if p.grad is not None: p.grad.zero_()` in a loop's head is zeroing written by hand, and reads no
        # values.
        if how == "reads" and not self._is_awaited(tensor) and _only_zeroes(frame):
            return
        if how == "reads" and is_only_a_look(frame):
            return
        line = user_line()
        when = (
            "between the backward pass and the step"
            if self._is_awaited(tensor)
            else "outside of backward pass and step"
        )
        self._note(EffectKind.GRADIENT, f"{how} gradients {when}", line)

    def _note(self, kind: EffectKind, what: str, line: str) -> None:
        self._found.setdefault(Effect(module="", kind=kind, what=what, line=line))


def _only_zeroes(frame: FrameType) -> bool:
    """Whether the bytecode after the read only compares the gradient with None, or zeroes it."""
    # The frame stands at the instruction that loads the attribute. Reading the source line instead would miss
    # what follows on the same line.
    following = next((i for i in instructions_of(frame.f_code) if i.offset > frame.f_lasti), None)
    return following is not None and (following.argval in _ZEROING or is_compared_with_none(frame))
