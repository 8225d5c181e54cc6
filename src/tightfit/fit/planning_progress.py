"""What is being done while a workload is estimated or planned, for whoever waits: in words, with what was found so far."""

import dataclasses
import sys
import time
from collections.abc import Callable

from tightfit.capture.processes.trace_progress import TraceProgress


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What is being done (`tracing with 2 techniques`), how far the program is that is traced for it (None between traces), how many runs were
    traced before, the best plan so far ("" without one), and the seconds that this trace still needs (None where nothing says how many)."""

    what: str
    trace: TraceProgress | None = None
    num_traced: int = 0
    best: str = ""
    seconds_left: float | None = None


OnProgress = Callable[[Progress], None]


class ProgressLog:
    """Gathers what is being done. `say` is called with each new sentence, `on_progress` a few times a second while a program is traced, too."""

    def __init__(self, *, say: Callable[[str], None] | None = None, on_progress: OnProgress | None = None) -> None:
        self._say = say or (lambda _: None)
        self._on_progress = on_progress
        self._now = Progress(what="")
        self._num_steps: int | None = None
        self._began = 0.0
        # Of the last run that was traced: its operators and its seconds.
        self._last: tuple[int, float] | None = None

    @property
    def on_trace(self) -> Callable[[TraceProgress], None] | None:
        """What a trace is given; None where nobody listens."""
        return None if self._on_progress is None else self._traced_so_far

    def begin(self, what: str, *, num_steps: int | None = None) -> None:
        """`what` begins, and is told to `say`; `num_steps`: it is a trace of as many steps, None where that is not known."""
        # `--steps all` and `--until` ask for as many as there are numbers.
        self._num_steps = None if num_steps == sys.maxsize else num_steps
        self._began = time.monotonic()
        self._emit(what=what, trace=None, seconds_left=None)
        self._say(what)

    def traced(self) -> None:
        """The trace that was begun last is over."""
        trace = self._now.trace
        if trace is not None:
            self._last = trace.num_operators, time.monotonic() - self._began
        self._emit(num_traced=self._now.num_traced + 1, trace=None, seconds_left=None)

    def best(self, words: str) -> None:
        """The best plan so far, in words."""
        self._emit(best=words)

    def _traced_so_far(self, trace: TraceProgress) -> None:
        self._emit(trace=trace, seconds_left=self._seconds_left(trace))

    def _seconds_left(self, trace: TraceProgress) -> float | None:
        """By the operators of the run before, or else by the step before; None where neither says anything, or it takes longer than that already."""
        if self._last is not None and trace.num_operators:
            num_operators, seconds = self._last
            left = seconds * (1 - trace.num_operators / num_operators) if num_operators else 0.0
        elif trace.seconds_per_step is not None and self._num_steps is not None:
            left = trace.seconds_per_step * (self._num_steps - trace.num_steps) - trace.seconds_waiting
        else:
            return None
        return left if left > 0 else None

    def _emit(self, **changes: object) -> None:
        self._now = dataclasses.replace(self._now, **changes)  # type: ignore[arg-type]
        if self._on_progress is not None:
            self._on_progress(self._now)
