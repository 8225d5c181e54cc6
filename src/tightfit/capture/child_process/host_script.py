"""Runs a script on the host until its first steps are over, and hands over what it has trained.

The steps are over where the program goes on to the next one: at the next call of a module, or at the next step of an optimizer, or at its end. There
the plain and the planned program are at the same line, with nothing of a step still to be done.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tightfit.capture.replace import replace
from tightfit.capture.targets.target_kinds import Script, run_script

_MOST_STEPS_OF_ONE_OPTIMIZER = 8
"""Times the steps asked for: an optimizer that has not stepped until another one has stepped so often has done its part, or waits for a later stage."""


class ScriptOnHost:
    """Follows a script for the rest of the process, until `num_steps` of each of its optimizers are over."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._done: Callable[[], None] = lambda: None
        self._is_over = False
        self._depth = 0
        self._roots: dict[int, torch.nn.Module] = {}
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._num_steps_of: Counter[int] = Counter()

    def install(self) -> None:
        """Follows calls of modules and steps of optimizers."""
        call, construct = torch.nn.Module.__call__, torch.optim.Optimizer.__init__
        own = threading.get_ident()

        def called(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            # In a backward pass modules are called for what is computed again; in another thread, which transforms batches, at any moment of a step.
            if threading.get_ident() != own or self._depth or torch._C._current_graph_task_id() != -1:
                return call(module, *args, **kwargs)
            self._goes_on()
            self._roots.setdefault(id(module), module)
            self._depth += 1
            try:
                return call(module, *args, **kwargs)
            finally:
                self._depth -= 1

        def constructed(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            construct(optimizer, *args, **kwargs)
            self._optimizers[id(optimizer)] = optimizer

        replace(torch.nn.Module, __call__=called)
        replace(torch.optim.Optimizer, __init__=constructed)
        register_optimizer_step_pre_hook(lambda *_: self._goes_on())
        register_optimizer_step_post_hook(lambda optimizer, *_: self._stepped(optimizer))

    def run(self, script: Script, *, done: Callable[[], None]) -> None:
        """Runs the script; `done` is called when its steps are over, or at its end, and does not return."""
        self._done = done
        # Held on to, so that at the end of a script its models are still there.
        held = run_script(script)
        self._done()
        del held

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters of the modules that were called, in the order of their first calls, and of the optimizers."""
        for number, root in enumerate(self._roots.values()):
            for name, parameter in root.named_parameters():
                yield f"{number}:{type(root).__name__}.{name}", parameter
        for number, optimizer in enumerate(self._optimizers.values()):
            for at, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
                yield f"{number}:{type(optimizer).__name__}.{at}", parameter

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers of the modules that were called."""
        for number, root in enumerate(self._roots.values()):
            for name, buffer in root.named_buffers():
                yield f"{number}:{type(root).__name__}.{name}", buffer

    @property
    def num_steps_seen(self) -> int:
        """How often the optimizer that stepped most has stepped, at most as often as was asked for."""
        return min(self._num_steps, max(self._num_steps_of.values(), default=0))

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        counts = self._num_steps_of
        counts[id(optimizer)] += 1
        most = max(counts.values())
        least = min(counts[number] for number in self._optimizers)
        self._is_over = least >= self._num_steps or most >= _MOST_STEPS_OF_ONE_OPTIMIZER * self._num_steps

    def _goes_on(self) -> None:
        if self._is_over:
            self._done()
