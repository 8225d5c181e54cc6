"""Hooks into backward passes, optimizers and module calls of the traced program, from which its phases and steps are known."""

import functools
import sys
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tightfit.capture.after_steps.fast_forward import FastForward
from tightfit.capture.dispatch.virtual import VirtualGpu
from tightfit.capture.replace import replace
from tightfit.capture.steps.category_marks import CategoryMarks
from tightfit.capture.steps.effects.effect_watch import EffectWatch
from tightfit.capture.steps.growing_calls import GrowingCalls
from tightfit.capture.steps.loops import loop_around
from tightfit.capture.steps.micro_batches.alike_batches import AlikeBatches
from tightfit.capture.steps.repetition import Repetition
from tightfit.effects.optimizer_marks import class_of_step
from tightfit.errors import CaptureError
from tightfit.tape import Phase, SpanKind


class Steps(Protocol):
    """What follows the steps of the program; `tightfit.capture.steps.detector.StepWatch`."""

    after: FastForward | None
    by_yield: bool
    num_ended: int

    @property
    def is_in_step(self) -> bool:
        """Whether a step of a script has begun, and not ended."""
        ...

    def begin_step(self, *, is_call: bool = False) -> bool:
        """Something of a step is about to run; whether a step begins with it."""
        ...

    def after_prediction(self, *, with_gradients: bool) -> None:
        """An outermost call of a model has returned."""
        ...

    def after_backward(self) -> None:
        """A backward pass outside of an optimizer's step has run."""
        ...

    def after_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped."""
        ...


class StepHooks:
    """Follows phases through torch's own entry points, and tells `watch` of backward passes and optimizers' steps."""

    def __init__(
        self,
        gpu: VirtualGpu,
        watch: Steps,
        marks: CategoryMarks,
        effects: EffectWatch | None,
        batches: AlikeBatches | None,
    ) -> None:
        self._gpu = gpu
        self._batches = batches
        self._watch = watch
        self._marks = marks
        self._effects = effects
        # An optimizer may step inside a backward pass, or inside the step of another one, or of its subclass.
        self._graphs_of_threads = ""  # the line where a thread has made one
        self._steps_around: list[tuple[torch.optim.Optimizer, Phase]] = []

    def install(self) -> None:
        """Puts the hooks in place; a process that has done this is not used for anything else."""
        self._watch_backward()
        self._watch_optimizers()
        self._watch_modules()

    def _watch_backward(self) -> None:
        run_backward = torch.autograd._engine_run_backward

        def watched(*args: Any, **kwargs: Any) -> Any:
            recorder = self._gpu.recorder
            outer = recorder.phase
            self._refuse_in_a_thread("runs a backward pass")
            self._refuse_graphs_of_threads()
            # A reentrant checkpoint runs a pass inside of a pass: it is part of the outer one.
            if outer == Phase.BACKWARD:
                with self._gpu.attribution.inner_backward():
                    return run_backward(*args, **kwargs)
            self._watch.begin_step()
            recorder.loops.add(loop_around(sys._getframe()))
            self._marks.watch_leaves(args[0])
            self._marks.mark_activations()
            batches = self._batches
            if self._effects is not None and not (batches is not None and batches.answers.is_waiting):
                self._effects.backward(args[0], args[1:], kwargs)
            recorder.phase = Phase.BACKWARD
            # A module may run parts of its forward backwards before it returns; what runs then is not its own but that of the parts.
            modules = self._gpu.attribution.modules
            around = modules[:]
            modules.clear()
            try:
                if batches is None:
                    return run_backward(*args, **kwargs)
                return batches.backward(args[0], args[1:], kwargs, lambda: run_backward(*args, **kwargs))
            finally:
                modules[:] = around
                if self._gpu.on_backward_end is not None:
                    self._gpu.on_backward_end()
                goes_on = outer == Phase.OPTIMIZER or (outer == Phase.FORWARD and bool(around))
                recorder.phase = outer if goes_on else Phase.OTHER
                self._marks.begin_forward()
                self._gpu.attribution.forget_graph()
                self._marks.mark_gradients()
                if not self._steps_around:
                    self._watch.after_backward()

        replace(torch.autograd, _engine_run_backward=watched)

    def _watch_optimizers(self) -> None:
        construct = torch.optim.Optimizer.__init__

        def constructed(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            construct(optimizer, *args, **kwargs)
            # A subclass may call the base constructor twice; `in` would compare optimizers by equality.
            if not any(known is optimizer for known in self._marks.optimizers):
                self._marks.optimizers.append(optimizer)
                self._marks.had_optimizers = True

        def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
            self._refuse_in_a_thread("steps an optimizer")
            if self._batches is not None:
                self._batches.begin_update()
            self._watch.begin_step()
            self._marks.mark_gradients()
            self._gpu.recorder.optimizers[class_of_step(optimizer)] = None
            if self._effects is not None:
                self._effects.before_step(optimizer)
            self._steps_around.append((optimizer, self._gpu.recorder.phase))
            self._gpu.recorder.phase = Phase.OPTIMIZER
            # Of the arguments of a step, which begin with the optimizer, only a closure can be called.
            followed = {name: self._follow_closure(value) for name, value in kwargs.items()}
            return (*args[:1], *map(self._follow_closure, args[1:])), followed

        def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            _, outer = self._steps_around.pop()
            self._gpu.recorder.phase = outer if outer in (Phase.BACKWARD, Phase.OPTIMIZER) else Phase.OTHER
            self._marks.mark_state(optimizer)
            if all(optimizer is not around for around, _ in self._steps_around):
                self._watch.after_optimizer_step(optimizer)

        replace(torch.optim.Optimizer, __init__=constructed)
        # torch's global hooks see the step of every optimizer class that goes through
        # `Optimizer.profile_hook_step`, which each subclass's `step` is wrapped in.
        register_optimizer_step_pre_hook(before)
        register_optimizer_step_post_hook(after)

    def _follow_closure(self, value: Any) -> Any:
        """Wraps a closure that an optimizer's step calls: inside it, phases are those outside of an optimizer step."""
        if not callable(value):
            return value
        recorder = self._gpu.recorder

        @functools.wraps(value, updated=())
        def followed(*args: Any, **kwargs: Any) -> Any:
            recorder.phase = Phase.OTHER
            self._marks.begin_forward()
            try:
                return value(*args, **kwargs)
            finally:
                recorder.phase = Phase.OPTIMIZER

        return followed

    def _refuse_in_a_thread(self, does: str) -> None:
        if self._gpu.fake.is_in_another_thread():
            self._gpu.fake.refuse_this_thread()
        if self._gpu.recorder.is_in_thread:
            raise CaptureError(
                f"{self._gpu.attribution.where(otherwise='the program')} {does} in a thread of its own; a trace only follows threads that move and transform batches, or run a model: "
                "train in the main thread, at least while it is traced"
            )

    def _refuse_graphs_of_threads(self) -> None:
        if self._graphs_of_threads:
            raise CaptureError(
                f"{self._graphs_of_threads} runs a model in a thread of its own, with gradients enabled, and the program trains: train in the main thread, or "
                "call the model within `torch.no_grad()` there (each thread begins with gradients enabled), at least while it is traced"
            )

    def _watch_modules(self) -> None:
        call = torch.nn.Module.__call__
        attribution = self._gpu.attribution
        recorder, modules, lines_below = self._gpu.recorder, attribution.modules, attribution.lines_below
        repetition = Repetition(self._gpu)
        repetition.install()
        growing = GrowingCalls(self._gpu)
        if self._batches is not None:
            self._batches.answers.install()
        effects, after = self._effects, self._watch.after

        def inside(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            modules.append(module)
            attribution.called(module)
            try:
                if effects is not None:
                    return effects.call(module, args, kwargs, lambda: call(module, *args, **kwargs))
                return call(module, *args, **kwargs)
            finally:
                modules.pop()
                lines_below.pop(sys._getframe(), None)

        attribution.call_code = inside.__code__

        def watched(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            # Of a thread that is not followed nothing may get among what is known of the main one, which runs meanwhile.
            if recorder.is_beside or self._gpu.fake.is_in_another_thread():
                if not any(parameter.is_cuda for parameter in module.parameters()):
                    # A transform, often: no step begins with it.
                    return call(module, *args, **kwargs)
                if self._gpu.fake.is_in_another_thread():
                    self._gpu.fake.refuse_this_thread()
                self._gpu.fake.runs_a_model()
                # A graph that two threads have made is numbered twice.
                if torch.is_grad_enabled():
                    self._graphs_of_threads = self._gpu.attribution.where(otherwise="the program")
                if self._marks.had_optimizers:
                    self._refuse_graphs_of_threads()
            if not modules and recorder.phase in (Phase.OTHER, Phase.FORWARD):
                self._enter_root(module)
                # Answering repeated calls from memory pays off in evaluation loops of scripts; a generator
                # yields for each step, and there are three.
                # Inside a step each call has its seconds.
                if not (self._watch.by_yield or self._watch.is_in_step or torch.is_grad_enabled()):
                    is_answered, returned = False, None
                    # The seconds of a script that only predicts count.
                    if self._marks.optimizers:
                        is_answered, returned = growing.call(
                            module, args, kwargs, lambda: inside(module, *args, **kwargs)
                        )
                    if not is_answered:
                        returned = repetition.call(
                            module,
                            args,
                            kwargs,
                            lambda: inside(module, *args, **kwargs),
                            turn=self._watch.num_ended,
                            is_timed=not self._marks.optimizers,
                        )
                    self._watch.after_prediction(with_gradients=False)
                    return returned
                if torch.is_grad_enabled() and not (after is not None and after.is_on):
                    step = self._watch.num_ended
                    if self._batches is None:
                        returned = inside(module, *args, **kwargs)
                    else:
                        returned = self._batches.call(
                            module, args, kwargs, step, lambda: inside(module, *args, **kwargs)
                        )
                    self._watch.after_prediction(with_gradients=True)
                    return returned
            return inside(module, *args, **kwargs)

        replace(torch.nn.Module, __call__=watched)

    def _enter_root(self, module: torch.nn.Module) -> None:
        self._marks.roots[id(module)] = module
        recorder = self._gpu.recorder
        recorder.phase = Phase.FORWARD if torch.is_grad_enabled() else Phase.OTHER
        if torch.is_grad_enabled():
            if self._watch.begin_step(is_call=True):
                self._marks.begin_forward()
        elif self._watch.after is not None and self._watch.after.is_on:
            self._watch.after.call_begins()
        elif not (self._watch.by_yield or self._watch.is_in_step):
            name = f"without gradients at {self._gpu.attribution.where()}"
            if recorder.spans[-1][0] != name:
                recorder.span(name, SpanKind.ASIDE)
