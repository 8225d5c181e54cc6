"""The training loops of a script, which are left once enough of their steps were traced: in the next turn, where its step would begin, or at its head.

After a loop that is left in the middle of a turn, the gradients are there that a whole turn would have left behind: what the head of the turn has
dropped is allocated again.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FrameType

import torch

from tightfit.capture.after_steps.differing_batches import growing_batches, told_of_batches
from tightfit.capture.after_steps.growing_steps import growth_of_steps
from tightfit.capture.after_steps.rewritten_program import LoopLeft, RewrittenProgram
from tightfit.capture.dispatch.virtual import VirtualGpu
from tightfit.capture.observe.attribution import is_of_another_library, is_user_file, short
from tightfit.tape import NotReached, SpanKind

AFTER = "after the steps"
MAX_UNSEEN_STEPS = 8
"""A second optimizer may step this many times before the detector counts a step of it."""


class Patience:
    """How many steps may still end before a training loop is left."""

    def __init__(self) -> None:
        self.num_ended = 0
        """Steps since the last loop was left."""
        self._most = 0

    def begin(self, most: int) -> None:
        """Counts from now on, to so many steps."""
        self.num_ended, self._most = 0, most

    @property
    def is_over(self) -> bool:
        """Whether more steps have ended than a loop that can be left would have taken."""
        return self.num_ended >= self._most


def is_in_last_step(gpu: VirtualGpu) -> bool:
    """Whether the last of the steps asked for lasts: until the next one begins, as those before it did. Its figures are then those of any other
    step, with what the head of the next turn frees and loads."""
    return gpu.recorder.spans[-1][1] == SpanKind.STEP


class TrainingLoops:
    """The training loops of `program`. `parameters` gives those of its models and optimizers."""

    def __init__(
        self,
        gpu: VirtualGpu,
        program: RewrittenProgram,
        num_steps: int,
        parameters: Callable[[], Iterable[torch.Tensor]],
    ) -> None:
        self.num_ended = 0
        self.left_at = ""
        self.left: dict[int, None] = {}  # in the order in which they were left
        self.around: set[int] = set()
        """The loops around those that were left."""
        self._gpu = gpu
        self._program = program
        self._num_steps = num_steps
        self._parameters = parameters
        self._with_gradients: dict[int, list[weakref.ref[torch.Tensor]]] = {}
        self._frozen: list[weakref.ref[torch.Tensor]] = []
        self._unfreezing: set[int] = set()
        self.left_frozen: set[int] = set()
        """Those of `left` around other training loops that were left with frozen weights, which a later turn may unfreeze."""
        self.patience = Patience()
        self._num_steps_looked_at = 0
        self.later: list[NotReached] = []
        """What later steps would do: leave more and more allocated, or train more of the model."""

    def step_ended(self) -> None:
        """A training step has ended."""
        self.num_ended += 1
        self.patience.num_ended += 1
        if self.num_ended == 1:
            self._program.seen.first_step_ended()
        self._frozen = [weakref.ref(parameter) for parameter in self._parameters() if not parameter.requires_grad]
        for number in self._program.around(sys._getframe(1)):
            self._program.steps[number] += 1

    def begin(self, frame: FrameType | None, *, is_stoppable: bool) -> None:
        """The last of the steps asked for has ended, in `frame`. `is_stoppable`: a framework runs the loop, and was asked to stop."""
        self.patience.begin(_max_ended(self._program, self._num_steps, frame, is_stoppable=is_stoppable))

    def leave_before_step(self, frame: FrameType | None) -> None:
        """Leaves the training loop that runs in `frame`, where its next step would begin, if the user's code can be left there.

        Raises:
            LoopLeft: it is left.
        """
        number = self._program.loop_to_leave(frame, self._num_steps)
        if number is None or number not in self._with_gradients:
            return
        if self.goes_through_stages(number):
            return
        running = list(self._program.around(frame))
        around = running[running.index(number) + 1 :]
        had_gradients = [p for p in (reference() for reference in self._with_gradients[number]) if p is not None]
        self.leave(number, around)
        for parameter in had_gradients:
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
        self._program.leaving = number
        raise LoopLeft

    def begin_turn(self, number: int, running: Sequence[int]) -> None:
        """A loop with training steps begins a turn, among those that are `running`. If other loops took the steps, and ended by themselves, it is
        around them: each of its turns trains anew."""
        steps = self._program.steps
        if any(steps[inner] > 0 and inner not in running for inner in self._program.inside(number)):
            self.around.add(number)
        # One that unfreezes weights behind its steps trains more of the model in its next turn.
        if any(parameter is not None and parameter.requires_grad for parameter in (each() for each in self._frozen)):
            self._unfreezing.add(number)
        if self.goes_through_stages(number):
            self.patience.num_ended = 0

    def goes_through_stages(self, number: int) -> bool:
        """Whether a loop goes through a list of things that are trained one after the other, or unfreezes more and more of a model."""
        counts = self._program.loops[number].is_counting and number not in self._unfreezing
        return number in self.around and not counts

    def note_gradients(self, number: int) -> None:
        """Notes which parameters have gradients as a turn of a loop begins that may be left before it ends."""
        parameters = [p for p in self._parameters() if p.grad is not None]
        # Only dense gradients are known to be as large as their parameters.
        if all(p.grad is not None and p.grad.layout == torch.strided for p in parameters):
            self._with_gradients[number] = [weakref.ref(p) for p in parameters]

    def can_be_left(self, number: int, around: Sequence[int]) -> bool:
        """Whether enough steps have ended in a loop, or in one of the loops `around` it."""
        steps = self._program.steps
        enough = [n for n in (number, *around) if steps[n] >= self._num_steps]
        # A loop through stages has as many steps as all of its stages; each stage needs its own.
        return any(n == number or not self.goes_through_stages(n) for n in enough)

    def leave(self, number: int, around: Iterable[int]) -> None:
        """The loop is left now, inside of those `around` it."""
        loop = self._program.loops[number]
        self._program.steps[number] = -1
        self.left.setdefault(number)
        if number in self.around and not all(parameter.requires_grad for parameter in self._parameters()):
            self.left_frozen.add(number)
        self._training_left(f"{short(loop.file)}:{loop.line}", around)

    def framework_leaves(self, later: str) -> bool:
        """Whether the training loop of a framework, which has taken enough steps, is to end before its time; `later` would run in another epoch."""
        if is_in_last_step(self._gpu):
            return False
        place = self._gpu.attribution.where()
        if later:
            self.later.append(NotReached(what=later, where=place, condition="in a later epoch"))
        self._training_left(place, self._program.around(sys._getframe(1)))
        return True

    def _training_left(self, place: str, around: Iterable[int]) -> None:
        recorder = self._gpu.recorder
        self.left_at = self.left_at or f"{place} after step {self.num_ended}"
        recorder.assume(
            place,
            "the training loop was left after the steps that were traced; its later iterations are assumed to be like them",
        )
        # The loop around is left behind an evaluation, whose batches are of another size.
        num_steps = sum(kind == SpanKind.STEP for _, kind, *_ in recorder.spans)
        if num_steps > self._num_steps_looked_at:
            differing = told_of_batches(recorder)
            if differing:
                recorder.assume(place, differing)
                growing = growing_batches(recorder)
                if growing:
                    self.later.append(NotReached(what="larger batches", where=place, condition=growing))
            growth = growth_of_steps(recorder, self._gpu.storages.indices(), place)
            if growth is not None:
                self.later.append(growth)
        self._num_steps_looked_at = num_steps
        self.around.update(around)
        self.patience.begin(self._num_steps + MAX_UNSEEN_STEPS)
        recorder.span(AFTER, SpanKind.ASIDE)


def _max_ended(program: RewrittenProgram, num_steps: int, frame: FrameType | None, *, is_stoppable: bool) -> int:
    """How many steps may still end before a training loop is left."""
    if next(program.around(frame), None) is not None:
        return num_steps + MAX_UNSEEN_STEPS
    is_library = False
    while frame is not None:
        file = frame.f_code.co_filename
        is_user = is_user_file(file)
        if is_user and not program.is_rewritten(file):
            return 0
        is_library |= is_of_another_library(file)
        frame = frame.f_back
    if is_library and not is_stoppable:
        return 0
    return num_steps + MAX_UNSEEN_STEPS
