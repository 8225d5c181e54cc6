"""How long a trace goes on after its steps: until a time is over, or until the program has waited for nothing but others for a while.

A loop that was left early may leave others without what they wait for: a process that hands out batches is blocked at its full queue, and `join` waits
for it for ever.
"""

import dataclasses
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tightfit.capture.steps.detector import StepWatch

_SECONDS_TO_TRY_AGAIN = 0.2
_MIN_PATIENCE_SECONDS = 12.0
# Loading that took long before the first step takes as long before an evaluation.
_TIMES_BEFORE = 2
_PATIENCE_OF_FOLLOWER_SECONDS = 2.0
_WAITED = "it waited, and nothing ran"
# A program that computes on the host takes nearly all of the time; one that waits wakes up now and then.
_IDLE_SHARE = 0.1


@dataclasses.dataclass(slots=True, kw_only=True)
class TimeAfterSteps:
    """Ends the trace of `watch` after `timeout_seconds`, or earlier where nothing runs. `began` is when the program did; `clock` and `processor` give the
    seconds that have passed, and those of this process's threads."""

    watch: "StepWatch"
    timeout_seconds: float
    began: float
    clock: Callable[[], float] = time.monotonic
    processor: Callable[[], float] = time.process_time
    _begin: float = 0.0
    _active: float = 0.0
    _patience: float = _MIN_PATIENCE_SECONDS
    _seen: tuple[int, float] = (0, 0.0)

    def begin(self) -> None:
        """The steps are over."""
        self._begin = self._active = self.clock()
        self._patience = max(_MIN_PATIENCE_SECONDS, _TIMES_BEFORE * (self._begin - self.began))
        after = self.watch.after
        if after is not None and after.follows is not None and _WAITED in after.follows.stopped:
            # The trace that it follows came to the same place.
            self._patience = _PATIENCE_OF_FOLLOWER_SECONDS
        self._seen = (self.watch.gpu.recorder.num_operators, self.processor())
        self._wake()

    def _wake(self) -> None:
        left = self._begin + self.timeout_seconds - self.clock()
        signal.setitimer(signal.ITIMER_REAL, max(_SECONDS_TO_TRY_AGAIN, min(left, self._patience / 2)))

    def alarm(self, frame: FrameType | None) -> None:
        """Called from the signal's handler: ends the trace if it is time."""
        after = self.watch.after
        if after is None or self.watch.has_ended:
            return
        why = after.must_stop or self._why()
        if why:
            stop(self.watch, frame, why)
        else:
            self._wake()

    def _why(self) -> str:
        now = self.clock()
        if now - self._begin >= self.timeout_seconds - _SECONDS_TO_TRY_AGAIN:
            return f"stopped after {self.timeout_seconds:g} s"
        num_operators, seconds = self._seen
        self._seen = self.watch.gpu.recorder.num_operators, self.processor()
        if self._seen[0] != num_operators or self._seen[1] - seconds > _IDLE_SHARE * self._patience / 2:
            self._active = now
        return f"{_WAITED} for {self._patience:.0f} s" if now - self._active >= 0.95 * self._patience else ""


def stop(watch: "StepWatch", frame: FrameType | None, why: str) -> None:
    """Ends the trace, called from a signal's handler: at once where the program's own code runs or waits, else at the next check."""
    from tightfit.capture.after_steps.running_lines import is_between_our_lines

    after = watch.after
    if after is None or watch.has_ended:
        return
    if not is_between_our_lines(frame):
        after.stop(why)
    after.must_stop = why
    signal.setitimer(signal.ITIMER_REAL, _SECONDS_TO_TRY_AGAIN)
