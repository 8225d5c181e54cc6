"""What is shown while somebody waits: how far a trace is, where the program is if no step comes, what was found, and no number that nobody knows."""

import io
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tightfit.capture.processes.trace_progress import StatusFile, StatusReader, TraceProgress
from tightfit.cli.shared.progress import ProgressLine, progress_words
from tightfit.fit.planning_progress import Progress, ProgressLog


class Clock:
    """A clock that goes on only when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def at(
    num_steps: int, *, operators: int = 0, waiting: float = 0.0, step: float | None = None, place: str = ""
) -> TraceProgress:
    return TraceProgress(
        span=f"step {num_steps + 1}" if num_steps else "set-up",
        num_steps=num_steps,
        num_operators=operators,
        seconds_waiting=waiting,
        seconds_per_step=step,
        place=place,
    )


def test_what_is_done_how_far_it_is_and_what_was_found() -> None:
    progress = Progress(
        what="tracing with 2 techniques",
        trace=at(1, operators=12_345),
        num_traced=4,
        best="fits, 9.20 GiB, 310.0 ms per step",
        seconds_left=7.4,
    )
    assert progress_words(progress) == (
        "tracing with 2 techniques, 1 step seen, 12,345 operators; about 7 s more; 4 runs traced; "
        "best so far fits, 9.20 GiB, 310.0 ms per step"
    )


def test_without_a_step_for_long_the_line_of_the_program_and_the_option_that_ends_it() -> None:
    waiting = Progress(what="tracing", trace=at(0, waiting=23.2, place="data.py:40"))
    assert progress_words(waiting, 120.0) == "tracing, set-up; no step yet: data.py:40, for 23 s (--timeout 120)"
    later = Progress(what="tracing", trace=at(2, waiting=31.0), seconds_left=5.0)
    # Seconds that were foreseen for a step that does not come are not shown any more.
    assert progress_words(later) == "tracing, 2 steps seen; no step since step 2: for 31 s"


def test_in_a_pipe_a_line_each_ten_seconds_and_none_for_what_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProgressLine, "INTERVAL_IN_A_PIPE", 10.0)
    clock, stream = Clock(), io.StringIO()
    line = ProgressLine("plan train.py", stream=stream, clock=clock)
    line.report(Progress(what="tracing the plain run"))
    for seconds in (109.0, 110.5, 112.0, 119.0, 175.0):
        clock.now = seconds
        line.tick()
    assert stream.getvalue() == (
        "tightfit: 0:10 plan train.py: tracing the plain run\ntightfit: 1:15 plan train.py: tracing the plain run\n"
    )


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_on_a_terminal_one_line_is_rewritten_within_its_width_and_erased_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    clock, stream = Clock(), Terminal()
    with ProgressLine("plan train.py", stream=stream, clock=clock) as line:
        line.report(Progress(what="tracing the plain run"))
        clock.now += 3
        line.tick()
    shown = stream.getvalue().split("\r\x1b[K")
    assert "\n" not in stream.getvalue()
    assert shown[1] == "0:03 plan train.py: tracing t"
    assert shown[-1] == ""


def test_beside_the_programs_own_output_nothing_is_rewritten() -> None:
    stream = Terminal()
    line = ProgressLine("plan train.py", stream=stream, clock=Clock(), is_rewritten=False)
    line.report(Progress(what="tracing"))
    line.tick()
    assert stream.getvalue() == ""


def test_seconds_left_are_said_only_where_something_says_how_many() -> None:
    told: list[Progress] = []
    log = ProgressLog(on_progress=told.append)
    assert log.on_trace is not None
    log.begin("tracing", num_steps=3)
    # The first step has the set-up in it; the second tells the third.
    for trace, left in ((at(1), None), (at(2, step=4.0, waiting=1.0), 3.0), (at(2, step=4.0, waiting=9.0), None)):
        log.on_trace(trace)
        assert told[-1].seconds_left == left
    for number in (None, sys.maxsize):
        log.begin("tracing all", num_steps=number)
        log.on_trace(at(2, step=4.0))
        assert told[-1].seconds_left is None


def test_a_program_says_how_far_it_is_and_where_when_it_is_asked(tmp_path: Path) -> None:
    path, clock = str(tmp_path / "request.json"), Clock()

    def answer(_number: int) -> None:
        # What the handler in the asked process would write.
        Path(f"{path}.places").write_text('Current thread:\n  File "data.py", line 40 in read\n')

    reader = StatusReader(path, answer, clock=clock)
    assert reader.read() is None
    status = StatusFile(path)
    try:
        status.step(0)
        found = reader.read()
        assert found is not None and (found.num_steps, found.place) == (0, "")
        status.step(1)
        clock.now += 5
        reader.read()
        status("x" * 5000, 77)
        clock.now += 21
        found = reader.read()
        assert found is not None
        assert (found.num_steps, found.seconds_waiting) == (1, 21.0)
        assert found.place == ("data.py:40" if sys.platform == "linux" else "")
        json.loads(Path(f"{path}.status").read_text())
    finally:
        if sys.platform == "linux":
            signal.signal(signal.SIGRTMIN + 7, signal.SIG_DFL)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a real-time signal")
def test_the_place_is_that_of_the_line_that_runs(tmp_path: Path) -> None:
    path, clock = str(tmp_path / "request.json"), Clock()
    status = StatusFile(path)
    try:
        status.step(1)
        reader = StatusReader(path, lambda number: os.kill(os.getpid(), number), clock=clock)
        assert reader.read() is not None
        clock.now += 21
        found = reader.read()
        assert found is not None and re.fullmatch(r".*test_progress\.py:\d+", found.place)
    finally:
        signal.signal(signal.SIGRTMIN + 7, signal.SIG_DFL)
