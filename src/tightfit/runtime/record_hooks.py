"""Follows modules, phases and steps while a program is recorded, through torch's own global hooks and those of `torch_hooks`.

The hooks change nothing, so the run's results are the same. Each optimizer step is noted with the optimizer's number; which of them end a step of
the program is decided when the run is over (`snapshots.notes`). `num_steps` is an estimate meanwhile.
"""

import gc
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
from tightfit.techniques.lazy_tensors.lazy_tensor import LazyTensor
from tightfit.torch_hooks.backward import BackwardPass, on_backward
from tightfit.torch_hooks.replaced import Leave
from tightfit.torch_hooks.weak_references import WeakTable

# An optimizer that never steps must not keep the others' steps from being counted.
MAX_STEPS_OF_ONE_OPTIMIZER = 8

HeldTensors = dict[str, Iterable[torch.Tensor]]
Emit = Callable[[NoteKind, str, HeldTensors], None]


class RunHooks:
    """Calls `emit(kind, text, held tensors by category)` for each note; `before_turn` when a new iteration of the loop begins."""

    def __init__(self, emit: Emit) -> None:
        self.before_turn: Callable[[], None] = lambda: None
        self.num_steps = 0
        """The steps that are over, as far as can be told meanwhile."""
        self._emit = emit
        self._modules: list[str] = []
        self._paths: WeakTable[torch.nn.Module, str] = WeakTable()
        self._phases = [OTHER]
        self._numbers: WeakTable[torch.Tensor | Optimizer, int] = WeakTable()
        self._num_numbers = 0
        self._num_steps_of: WeakTable[Optimizer, int] = WeakTable()
        self._made_before: WeakTable[Optimizer, None] = WeakTable()
        self._is_told_by_user = False
        self._code_of_steps: types.CodeType | None = None
        self._handles: list[RemovableHandle] = []
        self._leave: Leave = _nothing

    def install(self) -> None:
        """Registers all hooks."""
        # Whether these are of the run that begins, or left over from one before, shows only when they step.
        for optimizer in _optimizers():
            self._made_before[optimizer] = None
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
        self._emit("held", "", held_tensors())

    def step(self) -> None:
        """The user marks the end of a step; from then on only these marks count."""
        if not self._is_told_by_user:
            self._is_told_by_user = True
            self.num_steps = 0
        self.num_steps += 1
        self._emit("step", BY_USER, {})

    def _enter_module(self, module: torch.nn.Module, _args: Any) -> None:
        self._end_steps_that_raised()
        if not self._modules and self._phases[-1] == OTHER:
            self._begin(FORWARD if torch.is_grad_enabled() else ASIDE)
        self._modules.append(self._path(module))
        self._emit("module", self._modules[-1], {})

    def _leave_module(self, _module: torch.nn.Module, _args: Any, _result: Any) -> None:
        if self._modules:
            self._modules.pop()
            self._emit("module", self._modules[-1] if self._modules else "", {})
        if not self._modules and self._phases[-1] in (FORWARD, ASIDE):
            self._end()

    def concerned_parameters(self) -> None:
        """Every pass of the process is recorded."""
        return

    def around_backward(self, backward: BackwardPass) -> Any:
        """Runs a backward pass, as a phase of the run."""
        # A pass inside of a pass, of a reentrant checkpoint, is part of the outer one.
        if BACKWARD in self._phases:
            return backward.run()
        self._end_steps_that_raised()
        self._begin(BACKWARD)
        try:
            return backward.run()
        finally:
            self._end()

    # Gradients are noted before the step, as many loops free them right after it.
    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        # The frame of torch's wrapper around `step`, which is of one code object for all optimizers.
        step = sys._getframe(1)
        self._code_of_steps = step.f_code
        self._end_steps_that_raised(step.f_back)
        self._emit(
            "held",
            "",
            {"gradients": [held for p in _parameters(optimizer) if p.grad is not None for held in _with_inner(p.grad)]},
        )
        self._begin(OPTIMIZER)

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._end()
        # After the step: states are made in the first one, and a fused or capturable step may replace its
        # counters.
        self._emit("held", "", {"optimizer_state": _states(optimizer), "parameters": _parameters(optimizer)})
        # What steps within the step of a wrapper has no turn of its own.
        step = sys._getframe(1)
        if not _runs(step.f_code, step.f_back):
            self._emit("step", f"{BY_OPTIMIZER} {self._number(optimizer)}", {})
            self._count_step(optimizer)

    def _end_steps_that_raised(self, frame: types.FrameType | None = None) -> None:
        """Torch calls no hook when a step raises: its phase is over if the call stack at `frame`, by default the caller's, has no step."""
        if self._phases[-1] == OPTIMIZER and not _runs(self._code_of_steps, frame or sys._getframe(1)):
            while self._phases[-1] == OPTIMIZER:
                self._end()

    def _number(self, optimizer: Optimizer) -> int:
        """The number of an optimizer; optimizers constructed anew in each iteration for the same parameters count as one."""
        # Groups may be empty, all of them too.
        first: torch.Tensor | Optimizer = next(iter(_parameters(optimizer)), optimizer)
        if first not in self._numbers:
            self._numbers[first] = self._num_numbers
            self._num_numbers += 1
        return self._numbers[first]

    def _count_step(self, optimizer: Optimizer) -> None:
        """A step ends when the slowest optimizer has stepped; one that was made in this run and has not stepped yet is waited for."""
        counts = self._num_steps_of
        if optimizer not in counts:
            for known in _optimizers():
                if known is optimizer or known not in self._made_before:
                    counts.setdefault(known, 0)
        counts[optimizer] += 1
        stepping = [count for count in counts.values() if count]
        if len(stepping) < len(counts) and max(stepping) < MAX_STEPS_OF_ONE_OPTIMIZER:
            return
        if not self._is_told_by_user and counts[optimizer] == min(stepping) > self.num_steps:
            self.num_steps += 1

    def _begin(self, phase: str) -> None:
        if self._phases[-1] == OTHER:
            self.before_turn()
        self._phases.append(phase)
        self._emit("phase", phase, {})

    def _end(self) -> None:
        self._phases.pop()
        self._emit("phase", self._phases[-1], {})

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
    modules = _all_of(torch.nn.Module)
    optimizers = list(_optimizers())
    parameters = [
        tensor
        for module in modules
        for table in ("_parameters", "_buffers")
        for tensor in module.__dict__.get(table, {}).values()
        if tensor is not None
    ]
    parameters += itertools.chain.from_iterable(_parameters(optimizer) for optimizer in optimizers)
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
    for tensor in _all_of(torch.Tensor):
        yield tensor
        if tensor.is_leaf and tensor.grad is not None:
            yield tensor.grad


def _all_of(kind: type) -> list[Any]:
    # type() and not isinstance(): some objects run code of their own when their class is read.
    return [found for found in gc.get_objects() if issubclass(type(found), kind)]


def _optimizers() -> Iterator[Optimizer]:
    """The optimizers that step themselves; wrappers by other libraries, which did not run the base class's constructor, are left out."""
    return (found for found in _all_of(Optimizer) if "_optimizer_step_pre_hooks" in found.__dict__)


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _states(optimizer: Optimizer) -> list[torch.Tensor]:
    states = (state for state in optimizer.state.values() if isinstance(state, dict))
    values = (value for state in states for value in state.values() if isinstance(value, torch.Tensor))
    return list(itertools.chain.from_iterable(map(_with_inner, values)))


def _with_inner(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """The tensors that hold the memory of a tensor, which may be one that a technique keeps in another form or not at all."""
    return tensor.source.held() if isinstance(tensor, LazyTensor) else (tensor,)
