"""The trace of a script after the steps asked for: training loops are left, and what comes later is traced, within a bound.

A loop in which enough training steps have ended is left in its next turn, where that turn's step would begin, or else when the turn after it begins;
the loop around it is left at its own next turn, so that the end of an epoch runs once. A loop around that goes through a list of things (stages, folds,
image sizes) goes on until two of its turns were alike.
The bound is a number of operators, not a time, so that two traces are the same.
"""

import dataclasses
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FrameType

import torch

from tightfit.capture.after_steps.rewritten_program import LoopLeft, RewrittenProgram
from tightfit.capture.after_steps.unreached import RunningLine, not_reached
from tightfit.capture.dispatch.virtual import VirtualGpu
from tightfit.capture.observe.attribution import is_of_another_library, is_user_file, short
from tightfit.tape import Coverage, NotReached, SpanKind
from tightfit.units import format_bytes

AFTER = "after the steps"
MIN_OPERATORS = 6_000
TIMES_OPERATORS = 1
"""The bound: as many operators after the steps, or this multiple of those until then, if that is more (docs/log.md, "After the steps")."""
PART_OF_A_LOOP = 3
"""Of that bound, one loop without training steps gets this part; the rest is for what follows it."""
MIN_TURNS = 3
MAX_UNSEEN_STEPS = 8
"""A second optimizer may step this many times before the detector counts a step of it."""
MIN_TURNS_ALIKE = 100
"""A loop without training steps is cut short after so many turns in a row that called a module and allocated the same."""
MIN_GROWTH_BYTES = 1024
MAX_TURNS_AROUND = 8
"""A loop that goes through stages is left after this many turns even if no two were alike."""
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__)))) + os.sep


class EndOfCapture(BaseException):
    """Enough was traced. A BaseException, so that a script's `except Exception` does not catch it."""


@dataclasses.dataclass(slots=True)
class _Turns:
    """The turns of one loop: where the latest began (operators, storages, module calls), what it did, and how many in a row did the same;
    `begin` and `alive_at_begin` are the operators and the allocated bytes when the first of them began.
    """

    operators: int
    storages: int
    calls: int
    alive: int = 0
    did: tuple[int, int] = (-1, -1)
    num_alike: int = 0
    num_turns: int = 0
    begin: int = 0
    alive_at_begin: int = 0


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
        self.num_calls = 0  # of modules at the root, and other beginnings of training
        self._gpu = gpu
        self._num_steps = num_steps
        self._settle = settle
        self._parameters = parameters
        self._with_gradients: dict[int, list[weakref.ref[torch.Tensor]]] = {}
        self._follows = follows
        self._max_operators = self._max_later = sys.maxsize
        self._num_turns = 0
        self._cuts: list[int] = []
        self._last_turn = 0
        self._num_ended = 0
        self._num_ended_since_left = 0
        self._max_ended_since_left = 0
        self._left: dict[int, None] = {}  # training loops, in the order in which they were left
        self._outer: set[int] = set()
        self._turns: dict[int, _Turns] = {}
        self._grows: list[NotReached] = []
        self._left_at = ""
        self._stopped = ""
        self._stack: tuple[RunningLine, ...] = ()

    def install(self) -> None:
        """Rewrites the program as it is loaded."""
        self.program.install(self._leaves, lambda: self.stop("--until"))

    def step_ended(self) -> None:
        """A training step has ended."""
        self._num_ended += 1
        self._num_ended_since_left += 1
        for number in self.program.around(sys._getframe(1)):
            self.program.steps[number] += 1

    def begin(self, *, is_stoppable: bool) -> None:
        """The last of the steps asked for has ended. `is_stoppable`: a framework runs the loop, and was asked to stop."""
        self.is_on = True
        recorder = self._gpu.recorder
        self._max_later = max(MIN_OPERATORS, TIMES_OPERATORS * recorder.num_operators)
        self._max_operators = recorder.num_operators + self._max_later
        self._num_ended_since_left = 0
        self._max_ended_since_left = self._patience(sys._getframe(1), is_stoppable=is_stoppable)
        self.program.ask_in_each_turn()
        progress = self._gpu.progress

        def watched(span: str, num_operators: int) -> None:
            if progress is not None:
                progress(span, num_operators)
            # One call of a module may be endless by itself.
            self._check(times=2)

        self._gpu.progress = watched
        self.on_begin()

    def _patience(self, frame: FrameType | None, *, is_stoppable: bool) -> int:
        """How many steps may still end before a training loop is left."""
        if next(self.program.around(frame), None) is not None:
            return self._num_steps + MAX_UNSEEN_STEPS
        is_library = False
        while frame is not None:
            file = frame.f_code.co_filename
            is_user = is_user_file(file)
            if is_user and not self.program.is_rewritten(file):
                return 0
            is_library |= is_of_another_library(file)
            frame = frame.f_back
        if is_library and not is_stoppable:
            return 0
        return self._num_steps + MAX_UNSEEN_STEPS

    def training_begins(self, *, is_call: bool) -> bool:
        """A forward pass with gradients (`is_call`), a backward pass or an optimizer's step begins after the steps. Returns whether it opened a span.

        Raises:
            EndOfCapture: training goes on and on, in a loop that cannot be left.
            LoopLeft: the step after those asked for would begin; the loop is left instead.
        """
        self.num_calls += 1
        self._check(times=2)
        # Before a backward pass that no module's call preceded, a forward pass has run, and would be held on to.
        if is_call and self._is_in_last_step():
            self._leave_before_step(sys._getframe(1))
        if self._num_ended_since_left >= self._max_ended_since_left:
            self.stop("its training loop cannot be left")
        return self._span("training")

    def _leave_before_step(self, frame: FrameType | None) -> None:
        """Leaves the training loop where its next step would begin, if the user's code can be left there.

        After the loop the gradients are there that a whole turn would have left behind: what its head has dropped is allocated again.
        """
        number = self.program.loop_to_leave(frame, self._num_steps)
        if number is None or number not in self._with_gradients:
            return
        running = list(self.program.around(frame))
        around = running[running.index(number) + 1 :]
        had_gradients = [p for p in (reference() for reference in self._with_gradients[number]) if p is not None]
        self._leave(number, around)
        for parameter in had_gradients:
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
        self.program.leaving = number
        raise LoopLeft

    def call_begins(self) -> None:
        """A module is called without gradients after the steps."""
        self.num_calls += 1
        self._check(times=2)
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
        times *= 1 if self._follows is None else 10
        if self.must_stop or self._gpu.recorder.num_operators > times * self._max_operators:
            self.stop(self.must_stop or _many(self._max_operators))

    def stop(self, why: str) -> None:
        """Ends the trace here.

        Raises:
            EndOfCapture: always.
        """
        self.stopped(why, _places(sys._getframe(1)))
        self._settle()
        raise EndOfCapture

    def stopped(self, why: str, places: Sequence[RunningLine]) -> None:
        """Notes that the trace ended at `places`, the lines of the user's code from the innermost out."""
        # The first reason counts: a program may swallow the end of the trace and run on.
        if not self._stopped:
            self.program.ask_in_each_turn()
            self._stopped, self._stack = why, tuple(places)
            if places:
                self._left_at = f"{short(places[0].file)}:{places[0].line} after step {self._num_ended}"

    def coverage(self) -> Coverage:
        """What the trace covers so far."""
        return Coverage(
            left_at=self._left_at,
            stopped=self._stopped,
            cuts=tuple(self._cuts),
            last_turn=self._last_turn,
            not_reached=(
                *self._grows,
                *not_reached(self.program, tuple(self._left), self._stack, is_stopped=bool(self._stopped)),
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
        if self._follows is not None and self._num_turns == self._follows.last_turn:
            self.stop(self._follows.stopped)
        self._last_turn = self._num_turns
        self._check(times=1)
        self._last_turn = 0
        program = self.program
        if not program.steps[number]:
            return self._is_cut(number)
        around = [n for n in program.around(sys._getframe(1)) if n != number]
        if self._is_in_last_step():
            self._note_gradients(number)
            return False
        waits = number in self._outer and not program.loops[number].is_counting
        if not self._has_enough(number, around) or (waits and not self._has_turned_alike(number)):
            return False
        self._leave(number, around)
        return True

    def _leave(self, number: int, around: Iterable[int]) -> None:
        loop = self.program.loops[number]
        self.program.steps[number] = -1
        self._left.setdefault(number)
        self._training_left(f"{short(loop.file)}:{loop.line}", around)

    def _note_gradients(self, number: int) -> None:
        """Notes which parameters have gradients as a turn of a loop begins that may be left before it ends."""
        parameters = [p for p in self._parameters() if p.grad is not None]
        # Only dense gradients are known to be as large as their parameters.
        if all(p.grad is not None and p.grad.layout == torch.strided for p in parameters):
            self._with_gradients[number] = [weakref.ref(p) for p in parameters]

    def framework_leaves(self) -> bool:
        """Whether the training loop of a framework, which has taken enough steps, is to end before its time."""
        if self._is_in_last_step():
            return False
        self._training_left(self._gpu.attribution.where(), self.program.around(sys._getframe(1)))
        return True

    def _is_in_last_step(self) -> bool:
        """Whether the last of the steps asked for lasts: until the next one begins, as those before it did. Its figures are then those of any other
        step, with what the head of the next turn frees and loads."""
        return self._gpu.recorder.spans[-1][1] == SpanKind.STEP

    def _has_enough(self, number: int, around: Sequence[int]) -> bool:
        steps, loops = self.program.steps, self.program.loops
        enough = [n for n in (number, *around) if steps[n] >= self._num_steps]
        # A loop through stages has as many steps as all of its stages; each stage needs its own.
        return any(n == number or loops[n].is_counting or n not in self._outer for n in enough)

    def _training_left(self, place: str, around: Iterable[int]) -> None:
        recorder = self._gpu.recorder
        self._left_at = self._left_at or f"{place} after step {self._num_ended}"
        recorder.assume(
            place,
            "the training loop was left after the steps that were traced; its later turns are taken to be like them",
        )
        self._outer.update(around)
        self._num_ended_since_left = 0
        self._max_ended_since_left = self._num_steps + MAX_UNSEEN_STEPS
        recorder.span(AFTER, SpanKind.ASIDE)

    def _has_turned_alike(self, number: int) -> bool:
        turns = self._turned(number, counts_alive=False)
        return turns.num_alike > 0 or turns.num_turns > MAX_TURNS_AROUND

    def _is_cut(self, number: int) -> bool:
        """Whether a loop without training steps is left now: it has done the same for so long, or takes too much of the bound."""
        turns = self._turned(number, counts_alive=True)
        if self._follows is None:
            num_operators = self._gpu.recorder.num_operators - turns.begin
            is_long = num_operators > self._max_later // PART_OF_A_LOOP and turns.num_turns >= MIN_TURNS
            is_cut = is_long or turns.num_alike >= MIN_TURNS_ALIKE
        else:
            is_cut = self._num_turns in self._follows.cuts
        if is_cut:
            self._cut(number, turns)
        return is_cut

    def _cut(self, number: int, turns: _Turns) -> None:
        loop, num_turns = self.program.loops[number], turns.num_turns
        place = f"{short(loop.file)}:{loop.line}"
        self._gpu.recorder.assume(
            place, f"the loop was left after {num_turns} turns; its later turns are taken to be like them"
        )
        growth = (self._alive_bytes() - turns.alive_at_begin) // max(1, num_turns)
        if growth >= MIN_GROWTH_BYTES:
            what, grows = (
                f"turns of the loop after the first {num_turns}",
                f"each leaves {format_bytes(growth)} more allocated",
            )
            self._grows.append(NotReached(what=what, where=place, condition=grows))
        self._cuts.append(self._num_turns)
        self.program.steps[number] = -1
        del self._turns[number]

    def _alive_bytes(self) -> int:
        num_bytes = self._gpu.recorder.storages["num_bytes"]
        return sum(num_bytes[index] for index in self._gpu.storages.indices())

    def _turned(self, number: int, *, counts_alive: bool) -> _Turns:
        """The turns of a loop, brought up to date as one of them begins; alike turns leave as much allocated, with `counts_alive`."""
        recorder = self._gpu.recorder
        num_bytes = recorder.storages["num_bytes"]
        turns = self._turns.get(number)
        if turns is None:
            turns = self._turns[number] = _Turns(recorder.num_operators, len(num_bytes), self.num_calls)
            turns.begin, turns.alive_at_begin = turns.operators, self._alive_bytes()
            return turns
        did = (recorder.num_operators - turns.operators, sum(num_bytes[turns.storages :]))
        is_alike = did == turns.did and self.num_calls > turns.calls
        if is_alike and counts_alive:
            # What a loop collects (a list of outputs) grows from turn to turn, and counts.
            alive = self._alive_bytes()
            is_alike, turns.alive = alive == turns.alive, alive
        turns.num_alike = turns.num_alike + 1 if is_alike else 0
        turns.num_turns += 1
        turns.did, turns.calls = did, self.num_calls
        turns.operators, turns.storages = recorder.num_operators, len(num_bytes)
        return turns


def _many(num_operators: int) -> str:
    return f"stopped after {num_operators:,} operators"


def _places(frame: FrameType | None) -> list[RunningLine]:
    """The lines of the user's code on the stack, from the innermost out."""
    found = []
    while frame is not None:
        code = frame.f_code
        if is_user_file(code.co_filename):
            found.append(RunningLine(code.co_filename, frame.f_lineno, code.co_firstlineno, code.co_name))
        frame = frame.f_back
    return found


def places_of(error: BaseException) -> list[RunningLine]:
    """The lines of the user's code that an exception passed, from the innermost out."""
    found, traceback = [], error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if is_user_file(code.co_filename):
            found.append(RunningLine(code.co_filename, traceback.tb_lineno, code.co_firstlineno, code.co_name))
        traceback = traceback.tb_next
    return found[::-1]


def is_between_our_lines(frame: FrameType | None) -> bool:
    """Whether an exception raised in `frame` would pass through our own code before it comes to the user's."""
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        if os.path.realpath(frame.f_code.co_filename).startswith(_OURS):
            return True
        frame = frame.f_back
    return False
