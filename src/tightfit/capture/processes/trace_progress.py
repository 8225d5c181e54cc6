"""How far a traced program is: the traced process writes it to a file beside its request, and the parent, which waits for it, reads that.

After a while without a step the parent also asks where the program is. It sends a signal, whose handler writes the stack of the main thread to another
file. Python runs it between two instructions: faulthandler's own, which runs wherever the signal comes, reads frames that Python has just freed (pop_frame
of Python 3.11 returns their memory before it forgets them), and ended long traces with a segmentation fault.
"""

import dataclasses
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

WAITING_SECONDS = 20.0
"""After so long without a step, the place of the program is looked up."""

_INTERVAL_SECONDS = 0.25
_SECONDS_BETWEEN_PLACES = 5.0
# The file is overwritten in place, always with as many bytes, so that a reader never sees the rest of a longer text.
_NUM_BYTES = 512
_MAX_SPAN = 300
_OURS = str(Path(__file__).parents[2]) + os.sep
_NOT_THE_USERS = re.compile(r"site-packages|^<|[/\\]python3")
# A real-time signal, as programs have their own use for SIGUSR1 (a scheduler's warning); 0: not on this system.
_ASK_FOR_THE_PLACE = signal.SIGRTMIN + 7 if sys.platform == "linux" else 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TraceProgress:
    """How far a traced program is: the part that runs (`step 2`), steps that are over, operators so far, seconds since the last step (or since the
    program began) and, after `WAITING_SECONDS` of them, the line that it is at ("" if that is not known). `seconds_per_step` is what the last whole
    step took to trace, None before the second one."""

    span: str
    num_steps: int
    num_operators: int
    seconds_waiting: float
    seconds_per_step: float | None
    place: str


class StatusFile:
    """The traced process's side, to be made before the program runs. `path` is that of its request."""

    def __init__(self, path: str) -> None:
        # Both files stay open as long as the process lives.
        self._status = os.open(f"{path}.status", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._places = os.open(f"{path}.places", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._num_steps = 0
        self._next = 0.0
        if _ASK_FOR_THE_PLACE:
            # Before the first status is written, which is what the parent waits for: without a handler the signal would end the process.
            signal.signal(_ASK_FOR_THE_PLACE, self._tell_place)

    def step(self, num_steps: int) -> None:
        """`num_steps` steps are over."""
        self._num_steps, self._next = num_steps, 0.0
        self("set-up" if not num_steps else f"step {num_steps}", 0)

    def _tell_place(self, number: int, frame: FrameType | None) -> None:
        lines = []
        while frame is not None:
            # As faulthandler writes them.
            lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}\n')
            frame = frame.f_back
        os.write(self._places, "".join(lines).encode(errors="replace"))

    def __call__(self, span: str, num_operators: int) -> None:
        """Notes where the trace is, a few times a second."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _INTERVAL_SECONDS
            said = json.dumps({"span": span[:_MAX_SPAN], "steps": self._num_steps, "operators": num_operators})
            os.pwrite(self._status, said.encode()[:_NUM_BYTES].ljust(_NUM_BYTES), 0)


class StatusReader:
    """The parent's side, for the request at `path`; `send_signal` sends a signal to its process."""

    def __init__(
        self, path: str, send_signal: Callable[[int], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = path
        self._send_signal = send_signal
        self._clock = clock
        self._num_steps = -1
        self._last_step = clock()
        self._seconds_per_step: float | None = None
        self._num_operators = 0
        self._next_place = 0.0
        self._place = ""

    def read(self) -> TraceProgress | None:
        """How far the program is; None while it has not begun."""
        try:
            with open(f"{self._path}.status", "rb") as file:
                said = json.loads(file.read())
        # The process has not begun, or is just writing.
        except (OSError, ValueError):
            return None
        now, num_steps = self._clock(), int(said["steps"])
        if num_steps != self._num_steps:
            # The first step has the set-up in it, and says nothing of the next one.
            is_whole = self._num_steps >= 1
            self._seconds_per_step = (now - self._last_step) / (num_steps - self._num_steps) if is_whole else None
            self._num_steps, self._last_step, self._place = num_steps, now, ""
        self._num_operators = max(self._num_operators, int(said["operators"]))
        waiting = now - self._last_step
        if waiting >= WAITING_SECONDS and now >= self._next_place:
            self._next_place = now + _SECONDS_BETWEEN_PLACES
            self._ask()
        return TraceProgress(
            span=str(said["span"]),
            num_steps=num_steps,
            num_operators=self._num_operators,
            seconds_waiting=waiting,
            seconds_per_step=self._seconds_per_step,
            place=self._answered() if waiting >= WAITING_SECONDS else "",
        )

    def _ask(self) -> None:
        if _ASK_FOR_THE_PLACE:
            with suppress(OSError):
                os.truncate(f"{self._path}.places", 0)
                self._send_signal(_ASK_FOR_THE_PLACE)

    def _answered(self) -> str:
        """The line that was answered last; until the next answer is there, the one before."""
        with suppress(OSError), open(f"{self._path}.places", "rb") as file:
            self._place = user_place(file.read().decode(errors="replace")) or self._place
        return self._place


def user_place(said: str) -> str:
    """The innermost line of the user's own code in faulthandler's output, whose last part is the main thread; "" if there is none."""
    places = [place for part in said.split("\n\n") if (place := _innermost(part))]
    return places[-1] if places else ""


def _innermost(said: str) -> str:
    frames = re.findall(r'^  File "([^"]+)", line (\d+)', said, re.MULTILINE)
    own = [(f, line) for f, line in frames if not (f.startswith(_OURS) or _NOT_THE_USERS.search(f))]
    return f"{os.path.relpath(own[0][0])}:{own[0][1]}" if own else ""
