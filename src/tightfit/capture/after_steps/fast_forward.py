"""The trace of a script after the steps asked for: training loops are left, and what comes later is traced, within a bound.

A loop in which enough training steps have ended is left in its next turn, where that turn's step would begin, or else when the turn after it begins;
the loop around it is left at its own next turn, so that the end of an epoch runs once. A loop around that goes through a list of things (stages, folds,
image sizes) goes on until two of its turns were alike.
The bound is a number of operators, not a time, so that two traces are the same.
"""

import sys
from collections.abc import Callable, Iterable, Sequence

import torch

from tightfit.capture.after_steps.other_loops import OtherLoops
from tightfit.capture.after_steps.rewritten_program import RewrittenProgram
from tightfit.capture.after_steps.running_lines import lines_of
from tightfit.capture.after_steps.training_loops import AFTER, TrainingLoops, is_in_last_step
from tightfit.capture.after_steps.unreached import RunningLine, not_reached, unfrozen_later
from tightfit.capture.dispatch.virtual import VirtualGpu
from tightfit.capture.observe.attribution import short
from tightfit.tape import Coverage, SpanKind

MIN_OPERATORS = 6_000
TIMES_OPERATORS = 1
"""The bound: as many operators after the steps, or this multiple of those until then, if that is more (docs/log.md, "After the steps")."""


class EndOfCapture(BaseException):
    """Enough was traced. A BaseException, so that a script's `except Exception` does not catch it."""


class FastForward:
    """What follows the steps of one script. `settle` ends the trace; it is called before `EndOfCapture` is raised.

    `follows` is the coverage of another trace of the same program, whose loops this one leaves at the same turns.
    """

    def __init__(
        self,
        gpu: VirtualGpu,
        num_steps: int,
        *,
        settle: Callable[[], None],
        parameters: Callable[[], Iterable[torch.Tensor]],
        follows: Coverage | None = None,
        until: tuple[str, int] | None = None,
    ) -> None:
        self.program = RewrittenProgram(until)
        self.is_on = False
        self.must_stop = ""  # set from a signal handler: why to stop at the next check
        self.on_begin: Callable[[], None] = lambda: None
        self.training = TrainingLoops(gpu, self.program, num_steps, parameters)
        self._others = OtherLoops(gpu, self.program, follows)
        self._gpu = gpu
        self._settle = settle
        self.follows = follows
        self._max_operators = self._max_later = sys.maxsize
        self._num_turns = 0
        self._last_turn = 0
        self._num_calls = 0
        self._stopped_at = ""
        self._stopped = ""
        self._stack: tuple[RunningLine, ...] = ()

    def install(self) -> None:
        """Rewrites the program as it is loaded."""
        self.program.install(self._leaves, lambda: self.stop("--until"))

    def begin(self, *, is_stoppable: bool) -> None:
        """The last of the steps asked for has ended. `is_stoppable`: a framework runs the loop, and was asked to stop."""
        self.is_on = True
        recorder = self._gpu.recorder
        self._max_later = max(MIN_OPERATORS, TIMES_OPERATORS * recorder.num_operators)
        self._max_operators = recorder.num_operators + self._max_later
        self.training.begin(sys._getframe(1), is_stoppable=is_stoppable)
        self.program.ask_in_each_turn()
        progress = self._gpu.operators.progress

        def watched(span: str, num_operators: int) -> None:
            if progress is not None:
                progress(span, num_operators)
            # One call of a module may be endless by itself.
            self._check(times=2)

        self._gpu.operators.progress = watched
        self.on_begin()

    def training_begins(self, *, is_call: bool) -> bool:
        """A forward pass with gradients (`is_call`), a backward pass or an optimizer's step begins after the steps. Returns whether it opened a span.

        Raises:
            EndOfCapture: training goes on and on, in a loop that cannot be left.
            LoopLeft: the step after those asked for would begin; the loop is left instead.
        """
        self._others.num_calls += 1
        self._check(times=2)
        # Before a backward pass that no module's call preceded, a forward pass has run, and would be held on to.
        if is_call and is_in_last_step(self._gpu):
            self.training.leave_before_step(sys._getframe(1))
        if self.training.patience.is_over:
            self.stop("its training loop cannot be left")
        return self._span("training")

    def call_begins(self) -> None:
        """A module is called without gradients after the steps."""
        self._others.num_calls += 1
        # The turns of a library's loop are not counted.
        if self.follows is not None and 0 < self.follows.last_call == self._num_calls:
            self.stop(self.follows.stopped)
        self._check(times=2)
        self._num_calls += 1
        self._span("without gradients")

    def _span(self, what: str) -> bool:
        recorder, name = self._gpu.recorder, f"{AFTER}: {what} at "
        if recorder.spans[-1][0].startswith(name) and what == "training":
            return False
        name += self._gpu.attribution.where()
        if recorder.spans[-1][0] == name:
            return False
        recorder.span(name, SpanKind.ASIDE)
        return True

    def _check(self, *, times: int) -> None:
        """Ends the trace, with `EndOfCapture`, where so many times the bound is exceeded."""
        # Techniques add operators to the same program, whose turns are counted instead.
        times *= 1 if self.follows is None else 10
        if self.must_stop or self._gpu.recorder.num_operators > times * self._max_operators:
            self.stop(self.must_stop or _many(self._max_operators))

    def stop(self, why: str, *, at_call: int = 0) -> None:
        """Ends the trace here; `at_call` is the number of the program's calls so far, where these are counted from its begin.

        Raises:
            EndOfCapture: always.
        """
        self._num_calls = at_call or self._num_calls
        self.stopped(why, lines_of(sys._getframe(1)))
        if at_call and self._stack:
            # The step that it is said to be ends there.
            self._stopped_at = _words(self._stack[0])
        self._settle()
        raise EndOfCapture

    def stopped(self, why: str, places: Sequence[RunningLine]) -> None:
        """Notes that the trace ended at `places`, the lines of the user's code from the innermost out."""
        # The first reason counts: a program may swallow the end of the trace and run on.
        if not self._stopped:
            self.program.ask_in_each_turn()
            self._stopped, self._stack = why, tuple(places)
            if places:
                self._stopped_at = f"{_words(places[0])} after step {self.training.num_ended}"

    def coverage(self) -> Coverage:
        """What the trace covers so far."""
        return Coverage(
            left_at=self._stopped_at or self.training.left_at,
            stopped=self._stopped,
            cuts=tuple(self._others.cuts),
            last_turn=self._last_turn,
            last_call=self._num_calls if self._stopped and not self._last_turn else 0,
            # A loop that is come to again is left again.
            not_reached=tuple(
                dict.fromkeys(
                    (
                        *self.training.later,
                        *self._others.grows,
                        *not_reached(
                            self.program, tuple(self.training.left), self._stack, is_stopped=bool(self._stopped)
                        ),
                        *unfrozen_later(self.program, self.training.left_frozen, tuple(self.training.left)),
                    )
                )
            ),
        )

    def _leaves(self, number: int) -> bool:
        """Whether the loop is left now, asked at the beginning of each of its turns."""
        if self._stopped or self.program.steps[number] < 0:
            # A bare `except:` has caught the end of the trace, or of this loop: each loop ends, so that the program does.
            return True
        if not self.is_on:
            return False
        self._num_turns += 1
        if self.follows is not None and self._num_turns == self.follows.last_turn:
            self.stop(self.follows.stopped)
        self._last_turn = self._num_turns
        self._check(times=1)
        self._last_turn = 0
        program, training = self.program, self.training
        if not program.steps[number]:
            return self._others.is_cut(number, at_turn=self._num_turns, max_operators=self._max_later)
        frame = sys._getframe(1)
        running = list(program.around(frame))
        training.begin_turn(number, running)
        if is_in_last_step(self._gpu):
            training.note_gradients(number)
            return False
        around = [n for n in running if n != number]
        waits = training.goes_through_stages(number)
        is_over = training.can_be_left(number, around) and not program.is_held_by_generator(number, frame)
        if not is_over or (waits and not self._others.has_turned_alike(number)):
            return False
        training.leave(number, around)
        return True


def _words(place: RunningLine) -> str:
    return f"{short(place.file)}:{place.line}"


def _many(num_operators: int) -> str:
    return f"stopped after {num_operators:,} operators"
