"""Follows modules, phases and steps while a program is recorded, through torch's own global hooks and those of `torch_hooks`.

The hooks change nothing, so the run's results are the same. Each optimizer step is noted with the optimizer's number; which of them end a step of
the program is decided when the run is over (`recordings.notes`). `steps` has an estimate meanwhile.
"""

import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from tightfit.runtime.recorded import ASIDE, BACKWARD, BY_OPTIMIZER, BY_USER, FORWARD, OPTIMIZER, OTHER, NoteKind
from tightfit.runtime.step_counter import StepCounter, all_optimizers, objects_of, parameters_of
from tightfit.techniques.lazy_tensors.lazy_tensor import LazyTensor
from tightfit.torch_hooks.backward import BackwardPass, on_backward
from tightfit.torch_hooks.replaced import Leave
from tightfit.torch_hooks.weak_references import WeakTable

HeldTensors = dict[str, Iterable[torch.Tensor]]
Emit = Callable[[NoteKind, str, HeldTensors], None]


class _Phases:
    """The phases that the run is in, the innermost last; each change is noted."""

    def __init__(self, hooks: "RunHooks") -> None:
        self._hooks = hooks
        self._phases = [OTHER]
        self.code_of_steps: types.CodeType | None = None
        """The code of torch's wrapper around the steps of optimizers."""

    def is_in(self, *phases: str) -> bool:
        """Whether the innermost phase is one of these."""
        return self._phases[-1] in phases

    def is_inside(self, phase: str) -> bool:
        """Whether the run is in `phase`, or in a phase within it."""
        return phase in self._phases

    def begin(self, phase: str) -> None:
        """A phase begins."""
        if self._phases[-1] == OTHER:
            self._hooks.before_turn()
        self._phases.append(phase)
        self._hooks.emit("phase", phase, {})

    def end(self) -> None:
        """The innermost phase ends."""
        self._phases.pop()
        self._hooks.emit("phase", self._phases[-1], {})

    def end_steps_that_raised(self, frame: types.FrameType | None = None) -> None:
        """Torch calls no hook when a step raises: its phase is over if the call stack at `frame`, by default the caller's, has no step."""
        if self._phases[-1] == OPTIMIZER and not _runs(self.code_of_steps, frame or sys._getframe(1)):
            while self._phases[-1] == OPTIMIZER:
                self.end()


class RunHooks:
    """Calls `emit(kind, text, held tensors by category)` for each note; `before_turn` when a new iteration of the loop begins."""

    def __init__(self, emit: Emit) -> None:
        self.before_turn: Callable[[], None] = lambda: None
        self.steps = StepCounter()
        self.emit = emit
        self._modules: list[str] = []
        self._paths: WeakTable[torch.nn.Module, str] = WeakTable()
        self._phases = _Phases(self)
        self._handles: list[RemovableHandle] = []
        self._leave: Leave = _nothing

    def install(self) -> None:
        """Registers all hooks."""
        self.steps.begin()
        # One after the other, so that an interrupt on the way leaves none that `remove` does not know.
        self._handles.append(register_module_forward_pre_hook(self._enter_module))
        # Called also where a forward raises: a program that catches that would otherwise stay inside of the
        # module for the rest of the recording.
        self._handles.append(register_module_forward_hook(self._leave_module, always_call=True))
        self._handles.append(register_optimizer_step_pre_hook(self._before_step))
        self._handles.append(register_optimizer_step_post_hook(self._after_step))
        self._leave = on_backward(self)

    def remove(self) -> None:
        """Removes all hooks, and notes the tensors that are held now."""
        self._leave()
        for handle in self._handles:
            handle.remove()
        self.emit("held", "", held_tensors())

    def step(self) -> None:
        """The user marks the end of a step; from then on only these marks count."""
        self.steps.mark()
        self.emit("step", BY_USER, {})

    def _enter_module(self, module: torch.nn.Module, _args: Any) -> None:
        self._phases.end_steps_that_raised()
        if not self._modules and self._phases.is_in(OTHER):
            self._phases.begin(FORWARD if torch.is_grad_enabled() else ASIDE)
        self._modules.append(self._path(module))
        self.emit("module", self._modules[-1], {})

    def _leave_module(self, _module: torch.nn.Module, _args: Any, _result: Any) -> None:
        if self._modules:
            self._modules.pop()
            self.emit("module", self._modules[-1] if self._modules else "", {})
        if not self._modules and self._phases.is_in(FORWARD, ASIDE):
            self._phases.end()

    def concerned_parameters(self) -> None:
        """Every pass of the process is recorded."""
        return

    def around_backward(self, backward: BackwardPass) -> Any:
        """Runs a backward pass, as a phase of the run."""
        # A pass inside of a pass, of a reentrant checkpoint, is part of the outer one.
        if self._phases.is_inside(BACKWARD):
            return backward.run()
        self._phases.end_steps_that_raised()
        self._phases.begin(BACKWARD)
        try:
            return backward.run()
        finally:
            self._phases.end()

    # Gradients are noted before the step, as many loops free them right after it.
    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        # The frame of torch's wrapper around `step`, which is of one code object for all optimizers.
        step = sys._getframe(1)
        self._phases.code_of_steps = step.f_code
        self._phases.end_steps_that_raised(step.f_back)
        self.emit(
            "held",
            "",
            {
                "gradients": [
                    held for p in parameters_of(optimizer) if p.grad is not None for held in _with_inner(p.grad)
                ]
            },
        )
        self._phases.begin(OPTIMIZER)

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._phases.end()
        # After the step: states are made in the first one, and a fused or capturable step may replace its
        # counters.
        self.emit("held", "", {"optimizer_state": _states(optimizer), "parameters": parameters_of(optimizer)})
        # What steps within the step of a wrapper has no turn of its own.
        step = sys._getframe(1)
        if not _runs(step.f_code, step.f_back):
            self.emit("step", f"{BY_OPTIMIZER} {self.steps.number(optimizer)}", {})
            self.steps.count(optimizer)

    def _path(self, module: torch.nn.Module) -> str:
        if module not in self._paths:
            prefix = self._modules[-1] if self._modules else ""
            # A module that is made inside of a forward gets the path of the module that called it as a prefix.
            for name, inner in module.named_modules(prefix=type(module).__name__):
                self._paths.setdefault(inner, f"{prefix}.{name}".lstrip("."))
        return self._paths[module]


def _runs(code: types.CodeType | None, frame: types.FrameType | None) -> bool:
    """Whether `frame`, or one that called it, runs `code`."""
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def _nothing() -> None:
    return None


def held_tensors() -> HeldTensors:
    """The tensors that all modules and optimizers of this process hold now."""
    modules = objects_of(torch.nn.Module)
    optimizers = list(all_optimizers())
    parameters = [
        tensor
        for module in modules
        for table in ("_parameters", "_buffers")
        for tensor in module.__dict__.get(table, {}).values()
        if tensor is not None
    ]
    parameters += itertools.chain.from_iterable(parameters_of(optimizer) for optimizer in optimizers)
    return {
        "parameters": parameters,
        "gradients": [
            held
            for tensor in parameters
            if tensor.is_leaf and tensor.grad is not None
            for held in _with_inner(tensor.grad)
        ],
        "optimizer_state": list(itertools.chain.from_iterable(_states(optimizer) for optimizer in optimizers)),
    }


def all_tensors() -> Iterator[torch.Tensor]:
    """Every tensor that Python's garbage collector tracks, and their gradients."""
    for tensor in objects_of(torch.Tensor):
        yield tensor
        if tensor.is_leaf and tensor.grad is not None:
            yield tensor.grad


def _states(optimizer: Optimizer) -> list[torch.Tensor]:
    states = (state for state in optimizer.state.values() if isinstance(state, dict))
    # Of the dict's own class, which changes no state that is kept in another form.
    values = (value for state in states for value in dict.values(state) if isinstance(value, torch.Tensor))
    return list(itertools.chain.from_iterable(map(_with_inner, values)))


def _with_inner(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """The tensors that hold the memory of a tensor, which may be one that a technique keeps in another form or not at all."""
    return tensor.source.held() if isinstance(tensor, LazyTensor) else (tensor,)
