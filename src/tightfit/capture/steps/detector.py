"""Detects steps and phases, and marks storages as parameters, gradients, optimizer state or activations.

In a generator a step ends at each `yield`. In a script it ends when an optimizer has stepped; with several optimizers, when the one that
steps least often has. In a script without an optimizer each backward pass ends a step.
"""

import functools
import gc
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tightfit.capture.after_steps import frameworks
from tightfit.capture.after_steps.fast_forward import FastForward
from tightfit.capture.dispatch.virtual import VirtualGpu
from tightfit.capture.replace import replace
from tightfit.capture.steps.effects.effect_watch import EffectWatch
from tightfit.capture.steps.loops import loop_around
from tightfit.capture.steps.repetition import Repetition
from tightfit.capture.steps.weak_sequence import WeakSequence
from tightfit.tape import Category, Coverage, Effect, Phase, SpanKind

# A loop that steps one optimizer several times for each step of another one (a critic, gradient accumulation by
# two optimizers) is within this; an optimizer that is further behind has stopped.
MAX_STEPS_OF_ONE_OPTIMIZER = 8
# More micro-batches than anybody accumulates; beyond it the optimizer that exists is taken for one that never
# steps.
MAX_BACKWARDS_WITHOUT_STEP = 256


class StepWatch:
    """Follows phases through torch's own entry points. `on_end` is called once, when the trace ends: after `num_steps` steps of a generator, or
    when `after`, which follows a script's steps, has come to its end.

    `on_step` is called whenever a step is over.
    """

    def __init__(
        self,
        gpu: VirtualGpu,
        num_steps: int,
        *,
        by_yield: bool,
        on_end: Callable[[], None],
        follows: Coverage | None = None,
        until: tuple[str, int] | None = None,
    ) -> None:
        self.gpu = gpu
        self.num_steps = num_steps
        self.num_ended = 0
        self.on_step: Callable[[], None] = lambda: None
        self.has_ended = False
        self.after = (
            None
            if by_yield
            else FastForward(
                gpu, num_steps, settle=self.settle, parameters=self._parameters, follows=follows, until=until
            )
        )
        self._by_yield = by_yield
        self._on_end = on_end
        # What a program drops is freed, also while it is watched.
        self._optimizers: WeakSequence[torch.optim.Optimizer] = WeakSequence()
        self._num_optimizer_steps: Counter[int] = Counter()
        self._num_counted = 0  # steps since the optimizers' steps are counted
        self._has_stepped = False
        # An optimizer may step inside a backward pass, or inside the step of another one, or of its subclass.
        self._steps_around: list[tuple[torch.optim.Optimizer, Phase]] = []
        self._num_backwards = 0
        self._roots: weakref.WeakValueDictionary[int, torch.nn.Module] = weakref.WeakValueDictionary()
        self._leaves: dict[int, weakref.ref[torch.Tensor]] = {}
        self._first_operator = 0
        self._effects: EffectWatch | None = None

    def watch_effects(self) -> None:
        """Watches modules and gradients for side effects; to be called before `install`."""
        self._effects = EffectWatch(self.gpu, self._optimizers, lambda: self.gpu.recorder.phase == Phase.OPTIMIZER)

    def effects(self) -> tuple[Effect, ...]:
        """The observed effects; empty if they were not watched."""
        return () if self._effects is None else self._effects.effects()

    def install(self) -> None:
        """Hooks backward passes, optimizers and module calls; a process that has done this is not used for anything else."""
        self.gpu.recorder.span("set-up", SpanKind.SETUP)
        if self.after is not None:
            self.after.install()
        self._watch_backward()
        self._watch_optimizers()
        self._watch_modules()

    def _watch_backward(self) -> None:
        run_backward = torch.autograd._engine_run_backward

        def watched(*args: Any, **kwargs: Any) -> Any:
            recorder = self.gpu.recorder
            outer = recorder.phase
            # A reentrant checkpoint runs a pass inside of a pass: it is part of the outer one.
            if outer == Phase.BACKWARD:
                return run_backward(*args, **kwargs)
            self._begin_step()
            recorder.loops.add(loop_around(sys._getframe()))
            self._watch_leaves(args[0])
            self._settle_forward()
            if self._effects is not None:
                self._effects.backward(args[0], args[1:], kwargs)
            recorder.phase = Phase.BACKWARD
            # A module may run parts of its forward backwards before it returns; what runs then is not its own but that of the parts.
            modules = self.gpu.attribution.modules
            around = modules[:]
            modules.clear()
            try:
                return run_backward(*args, **kwargs)
            finally:
                modules[:] = around
                goes_on = outer == Phase.OPTIMIZER or (outer == Phase.FORWARD and bool(around))
                recorder.phase = outer if goes_on else Phase.OTHER
                self._first_operator = recorder.num_operators
                self.gpu.attribution.forget_graph()
                self._mark_gradients()
                if not self._steps_around:
                    self._after_backward()

        replace(torch.autograd, _engine_run_backward=watched)

    def _watch_optimizers(self) -> None:
        construct = torch.optim.Optimizer.__init__

        def constructed(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            construct(optimizer, *args, **kwargs)
            # A subclass may call the base constructor twice; `in` would compare optimizers by equality.
            if not any(known is optimizer for known in self._optimizers):
                self._optimizers.append(optimizer)

        def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
            self._begin_step()
            self._mark_gradients()
            if self._effects is not None:
                self._effects.before_step(optimizer)
            self._steps_around.append((optimizer, self.gpu.recorder.phase))
            self.gpu.recorder.phase = Phase.OPTIMIZER
            # Of the arguments of a step, which begin with the optimizer, only a closure can be called.
            followed = {name: self._follow_closure(value) for name, value in kwargs.items()}
            return (*args[:1], *map(self._follow_closure, args[1:])), followed

        def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            _, outer = self._steps_around.pop()
            self.gpu.recorder.phase = outer if outer in (Phase.BACKWARD, Phase.OPTIMIZER) else Phase.OTHER
            self._mark_state(optimizer)
            if all(optimizer is not around for around, _ in self._steps_around):
                self._after_optimizer_step(optimizer)

        replace(torch.optim.Optimizer, __init__=constructed)
        # torch's global hooks see the step of every optimizer class that goes through
        # `Optimizer.profile_hook_step`, which each subclass's `step` is wrapped in.
        register_optimizer_step_pre_hook(before)
        register_optimizer_step_post_hook(after)

    def _follow_closure(self, value: Any) -> Any:
        """Wraps a closure that an optimizer's step calls: inside it, phases are those outside of an optimizer step."""
        if not callable(value):
            return value
        recorder = self.gpu.recorder

        @functools.wraps(value, updated=())
        def followed(*args: Any, **kwargs: Any) -> Any:
            recorder.phase = Phase.OTHER
            self._first_operator = recorder.num_operators
            try:
                return value(*args, **kwargs)
            finally:
                recorder.phase = Phase.OPTIMIZER

        return followed

    def _watch_modules(self) -> None:
        call = torch.nn.Module.__call__
        recorder, modules = self.gpu.recorder, self.gpu.attribution.modules
        repetition = Repetition(self.gpu)
        repetition.install()
        effects = self._effects

        def inside(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            modules.append(module)
            try:
                if effects is not None:
                    return effects.call(module, args, kwargs, lambda: call(module, *args, **kwargs))
                return call(module, *args, **kwargs)
            finally:
                modules.pop()

        def watched(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not modules and recorder.phase in (Phase.OTHER, Phase.FORWARD):
                self._enter_root(module)
                # Answering repeated calls from memory pays off in evaluation loops of scripts; a generator
                # yields for each step, and there are three.
                if not (self._by_yield or torch.is_grad_enabled()):
                    return repetition.call(module, args, kwargs, lambda: inside(module, *args, **kwargs))
            return inside(module, *args, **kwargs)

        replace(torch.nn.Module, __call__=watched)

    def _enter_root(self, module: torch.nn.Module) -> None:
        self._roots[id(module)] = module
        recorder = self.gpu.recorder
        recorder.phase = Phase.FORWARD if torch.is_grad_enabled() else Phase.OTHER
        if torch.is_grad_enabled():
            if self._begin_step(is_call=True):
                self._first_operator = recorder.num_operators
        elif self.after is not None and self.after.is_on:
            self.after.call_begins()
        elif not self._by_yield:
            name = f"without gradients at {self.gpu.attribution.where()}"
            if recorder.spans[-1][0] != name:
                recorder.span(name, SpanKind.ASIDE)

    def _begin_step(self, *, is_call: bool = False) -> bool:
        if self.after is not None and self.after.is_on:
            return self.after.training_begins(is_call=is_call)
        recorder = self.gpu.recorder
        name = f"step {self.num_ended + 1}"
        if self._by_yield or recorder.spans[-1][0] == name:
            return False
        recorder.span(name, SpanKind.STEP)
        return True

    def begin_yielded_step(self) -> None:
        """A generator is about to be resumed."""
        self.gpu.recorder.span(f"step {self.num_ended + 1}", SpanKind.STEP)

    def end_step(self) -> None:
        """One iteration of the user's loop has ended."""
        self.num_ended += 1
        self._num_counted += 1
        if self._effects is not None:
            self._effects.end_step()
        self.on_step()
        self._mark(self._parameters(), Category.PARAMETERS)
        if self.after is not None:
            self.after.step_ended()
        if self.num_ended == self.num_steps:
            self._mark_parameters()
            if self.after is None:
                self.settle()
            else:
                self._go_on(self.after)

    def _go_on(self, after: FastForward) -> None:
        """The steps asked for are over: the script runs on to what comes later."""
        # Optimizers that have done their part, such as that of a first stage, are not waited for.
        self._num_optimizer_steps.clear()
        self._num_counted = 0
        after.begin(is_stoppable=frameworks.stop(self.num_steps, after.framework_leaves))

    def settle(self) -> None:
        """Ends the trace, once: the tape can be taken."""
        if not self.has_ended:
            self.has_ended = True
            if not self._by_yield:
                self._mark_parameters()
            self._on_end()

    def _after_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._by_yield:
            return
        self._has_stepped = True
        counts = self._num_optimizer_steps
        counts[id(optimizer)] += 1
        waiting = [o for o in self._optimizers if not counts[id(o)]]
        if waiting and max(counts.values()) < MAX_STEPS_OF_ONE_OPTIMIZER:
            return
        # An optimizer that is so far behind has done its part, such as that of a first stage.
        least = min(count for count in counts.values() if count > max(counts.values()) - MAX_STEPS_OF_ONE_OPTIMIZER)
        if counts[id(optimizer)] == least > self._num_counted:
            self.end_step()

    def _after_backward(self) -> None:
        self._num_backwards += 1
        patient = self._optimizers and self._num_backwards < MAX_BACKWARDS_WITHOUT_STEP
        if self._by_yield or self._has_stepped or patient:
            return
        self.gpu.recorder.assume(
            self.gpu.attribution.where(),
            "no optimizer of torch.optim steps here: each backward pass is assumed to end a step",
        )
        self.end_step()

    def _mark(self, tensors: Iterable[torch.Tensor | None], category: Category) -> None:
        self.gpu.recorder.mark(
            (i for t in tensors if t is not None and (i := self.gpu.index_of(t)) is not None), category
        )

    def _watch_leaves(self, losses: Iterable[torch.Tensor]) -> None:
        """A script without optimizers and modules has parameters too: the leaves that its gradients are accumulated in."""
        if self._optimizers or self._roots:
            return
        waiting = [loss.grad_fn for loss in losses]
        seen = set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                self._leaves.setdefault(id(leaf), weakref.ref(leaf))
            waiting.extend(next_node for next_node, _ in node.next_functions)

    def _parameters(self) -> Iterable[torch.Tensor]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]
        for module in list(self._roots.values()):
            yield from module.parameters()
        for reference in self._leaves.values():
            leaf = reference()
            if leaf is not None:
                yield leaf

    def _mark_gradients(self) -> None:
        self._mark((p.grad for p in self._parameters()), Category.GRADIENTS)

    def _mark_state(self, optimizer: torch.optim.Optimizer) -> None:
        values = itertools.chain.from_iterable(s.values() for s in optimizer.state.values() if isinstance(s, dict))
        tensors = (v for v in values if isinstance(v, torch.Tensor))
        self._mark(itertools.chain.from_iterable(map(_with_inner, tensors)), Category.OPTIMIZER_STATE)

    def _mark_parameters(self) -> None:
        # Models that are never called as a root hold parameters too: an average of the weights, a target
        # network. `issubclass` of the type, since `isinstance` asks objects for `__class__`, which runs code in
        # proxies and lazy modules.
        modules = [o for o in gc.get_objects() if issubclass(type(o), torch.nn.Module)]
        tables = itertools.chain.from_iterable(
            (m.__dict__.get("_parameters", {}), m.__dict__.get("_buffers", {})) for m in modules
        )
        self._mark((t for table in tables for t in table.values()), Category.PARAMETERS)
        self._mark(self._parameters(), Category.PARAMETERS)
        for optimizer in self._optimizers:
            self._mark_state(optimizer)
        self._mark_gradients()

    def _settle_forward(self) -> None:
        """Marks what was allocated in a forward pass and is alive when the backward pass begins as activations."""
        recorder = self.gpu.recorder
        categories, operators = recorder.storages["category"], recorder.storages["operator"]
        alive = [reference.index for reference in self.gpu.references.values()]
        waiting = [i for i in alive if categories[i] == Category.TEMPORARIES and operators[i] >= self._first_operator]
        recorder.mark(waiting, Category.ACTIVATIONS)


def _with_inner(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """The tensors that hold the memory of a tensor that may be a wrapper."""
    if type(tensor) is not FakeTensor and is_traceable_wrapper_subclass(tensor):
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [tensor]
