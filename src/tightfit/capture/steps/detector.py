"""Detects where a step of the traced program begins and ends.

In a generator a step ends at each `yield`. In a script it ends when an optimizer has stepped; with several optimizers, when the one that
steps least often has. In a script without an optimizer each backward pass ends a step.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable

import torch

from tightfit.capture.after_steps import frameworks
from tightfit.capture.after_steps.fast_forward import FastForward
from tightfit.capture.dispatch.virtual import VirtualGpu
from tightfit.capture.steps.category_marks import CategoryMarks
from tightfit.capture.steps.effects.effect_watch import EffectWatch
from tightfit.capture.steps.micro_batches.alike_batches import AlikeBatches
from tightfit.capture.steps.predictions import is_long
from tightfit.capture.steps.recurring_calls import REPEATED, merge_recurring_calls
from tightfit.capture.steps.step_hooks import StepHooks
from tightfit.capture.steps.wrapping_optimizers import holds_another
from tightfit.tape import Coverage, Phase, SpanKind
from tightfit.tape.step_ends import ends_step

# More micro-batches than anybody accumulates; beyond it the optimizer that exists is taken for one that never
# steps.
MAX_BACKWARDS_WITHOUT_STEP = 256


class OptimizerSteps:
    """Counts the steps of each optimizer, and those of the script since then."""

    def __init__(self) -> None:
        self.num_ended = 0
        self._counts: Counter[int] = Counter()
        self._stepped: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self._waited_for: list[weakref.ref[torch.optim.Optimizer]] | None = None

    def end_step(self, optimizer: torch.optim.Optimizer, known: Iterable[torch.optim.Optimizer]) -> bool:
        """Counts a step of `optimizer`; whether a step of the script, which has the optimizers `known`, is over with it."""
        if any(reference() is None for reference in self._stepped.values()):
            # The optimizer of a stage that is over; the next stage has its own steps.
            self.count_anew()
        if self._waited_for is None:
            # Those that are made later are not waited for: a loop may make one anew in each turn that never steps by itself, for the settings of an inner loop.
            self._waited_for = [weakref.ref(o) for o in known]
        counts = self._counts
        counts[id(optimizer)] += 1
        self._stepped[id(optimizer)] = weakref.ref(optimizer)
        others = [o for o in (reference() for reference in self._waited_for) if o is not None]
        waiting = [0 for o in others if id(o) not in self._stepped and not holds_another(o)]
        return ends_step([*counts.values(), *waiting], counts[id(optimizer)], self.num_ended)

    def count_anew(self) -> None:
        """Forgets the steps so far."""
        self._counts.clear()
        self._stepped.clear()
        self._waited_for = None
        self.num_ended = 0


class StepWatch:
    """Follows phases through torch's own entry points. `on_end` is called once, when the trace ends: after `num_steps` steps of a generator, or
    when `after`, which follows a script's steps, has come to its end.

    `on_step` is called whenever a step is over. With `watches_effects` modules and gradients are watched for side effects. `batches` answers micro-batches
    that are alike. `optimizers` are those of the program that are alive.
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
        watches_effects: bool = False,
        batches: AlikeBatches | None = None,
    ) -> None:
        self.gpu = gpu
        self.num_steps = num_steps
        self.num_ended = 0
        self.on_step: Callable[[], None] = lambda: None
        self.on_models: Callable[[], None] = lambda: None
        """Called where the models of the program are there: when a step has ended, and before the first one ends after each outermost call without gradients."""
        self._num_predictions = 0
        self.predicts_with_gradients = False
        """Whether the script, which is over, only called models, and some of them with gradients enabled, which it used for nothing."""
        self.has_ended = False
        self._marks = CategoryMarks(gpu)
        self.optimizers = self._marks.optimizers
        self._batches = batches
        self.after = (
            None
            if by_yield
            else FastForward(
                gpu, num_steps, settle=self.settle, parameters=self._marks.parameters, follows=follows, until=until
            )
        )
        self.by_yield = by_yield
        self._on_end = on_end
        self._optimizer_steps = OptimizerSteps()
        self._has_stepped = False
        self._num_backwards = 0
        self.effects = (
            EffectWatch(gpu, self._marks.optimizers, lambda: gpu.recorder.phase == Phase.OPTIMIZER)
            if watches_effects
            else None
        )

    def install(self) -> None:
        """Hooks backward passes, optimizers and module calls; a process that has done this is not used for anything else."""
        self.gpu.recorder.span("set-up", SpanKind.SETUP)
        if self.after is not None:
            self.after.install()
        StepHooks(self.gpu, self, self._marks, self.effects, self._batches).install()

    def begin_step(self, *, is_call: bool = False) -> bool:
        """A forward pass with gradients (`is_call`), a backward pass or an optimizer's step is about to run; whether a step begins with it."""
        if self.after is not None and self.after.is_on:
            return self.after.training_begins(is_call=is_call)
        if self.by_yield or self.is_in_step:
            return False
        self.gpu.recorder.span(_next_step(self.num_ended), SpanKind.STEP)
        return True

    @property
    def is_in_step(self) -> bool:
        """Whether a step of a script has begun, and not ended: what runs without gradients then (a teacher, a reference model) is a part of it."""
        return self.gpu.recorder.spans[-1][:2] == (_next_step(self.num_ended), SpanKind.STEP)

    def begin_yielded_step(self) -> None:
        """A generator is about to be resumed."""
        self.gpu.recorder.span(_next_step(self.num_ended), SpanKind.STEP)

    def end_step(self) -> None:
        """One iteration of the user's loop has ended."""
        self.num_ended += 1
        self._optimizer_steps.num_ended += 1
        if self.effects is not None:
            self.effects.end_step()
        self.on_models()
        self.on_step()
        self._marks.mark_parameters()
        if self.after is not None:
            self.after.training.step_ended()
        if self.num_ended == self.num_steps:
            self._marks.mark_all()
            if self.after is None:
                self.settle()
            else:
                # The script runs on to what comes later. Optimizers that have done their part, such as that of a first stage, are not waited for.
                self._optimizer_steps.count_anew()
                is_stoppable = frameworks.stop(self.num_steps, self.after.training.framework_leaves)
                self.after.begin(is_stoppable=is_stoppable)

    def after_prediction(self, *, with_gradients: bool) -> None:
        """An outermost call of a model has returned. What a script without an optimizer has called may be all that it does: then it predicts, and what it holds for a
        backward pass stays activations."""
        if self.num_ended or (with_gradients and (self.by_yield or self._num_backwards or self._marks.had_optimizers)):
            return
        if with_gradients:
            self._marks.mark_activations()
        self._num_predictions += 1
        self.on_models()
        after, number = self.after, self._num_predictions
        if (
            after is not None
            and is_long(
                after,
                number,
                self.gpu.recorder.num_operators,
                with_gradients=with_gradients,
                was_to_train=self._marks.had_optimizers,
            )
            and self.is_one_step(until_call=number)
        ):
            after.stop(f"stopped after {number:,} calls of a model", at_call=number)

    def is_one_step(self, *, until_call: int = 0) -> bool:
        """A script is over in which no step has ended, or is left at call `until_call` of a model: whether all of it from the first call of a model on is taken for
        one, as it only called modules, of which it had no gradients computed, or as an optimizer stepped while another one, which never has, was waited for."""
        # Models that a function made are gone by now.
        self.on_models = lambda: None
        if self._has_stepped:
            self.gpu.recorder.assume(
                self.gpu.attribution.where(),
                "an optimizer of the program never steps, and it ends before others have stepped often: all its turns are assumed to be one step",
            )
            self.end_step()
            return True
        spans = self.gpu.recorder.spans
        first = next((n for n, (_, kind, *_) in enumerate(spans) if kind != SpanKind.SETUP), None)
        has_gradients = any(kind == SpanKind.STEP for _, kind, *_ in spans)
        # A script with an optimizer was to train, and came to no backward pass.
        if first is None or self._num_backwards or (has_gradients and self._marks.had_optimizers):
            return False
        self.predicts_with_gradients = has_gradients
        spans[first] = ("step 1", SpanKind.STEP, *spans[first][2:])
        del spans[first + 1 :]
        names, texts = set(self.gpu.recorder.operators["name"][spans[first][3] :]), self.gpu.recorder.strings.texts
        is_cut = any(texts[int(name)].endswith(REPEATED) for name in names)
        self.gpu.recorder.assume(
            "",
            "nothing is trained here: from the first call of a model on, the script is assumed to be one step"
            + (", whose time leaves out the calls that repeat themselves" if is_cut else "")
            + (f"; its time is that of its first {until_call:,} calls alone" if until_call else ""),
        )
        self.end_step()
        return True

    def settle(self) -> None:
        """Ends the trace, once: the tape can be taken."""
        if not self.has_ended:
            self.has_ended = True
            if not self.by_yield:
                self._marks.mark_all()
                merge_recurring_calls(self.gpu.recorder)
            self._on_end()

    def after_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped: in a script the step is over when the one that steps least often has."""
        if self.by_yield:
            return
        self._has_stepped = True
        if self._optimizer_steps.end_step(optimizer, self._marks.optimizers):
            self.end_step()

    def after_backward(self) -> None:
        """A backward pass has run: it ends a step in a script where no optimizer steps."""
        self._num_backwards += 1
        patient = self._marks.optimizers and self._num_backwards < MAX_BACKWARDS_WITHOUT_STEP
        if self.by_yield or self._has_stepped or patient:
            return
        self.gpu.recorder.assume(
            self.gpu.attribution.where(),
            "no optimizer of torch.optim steps here: each backward pass is assumed to end a step",
        )
        self.end_step()


def _next_step(num_ended: int) -> str:
    return f"step {num_ended + 1}"
