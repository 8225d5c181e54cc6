"""The measurement in a fresh process: runs the steps of a row on the GPU and reads their peaks and times.

The same code runs on the virtual GPU (`on_virtual_gpu`), where torch answers from the simulated allocator; what only a driver and a clock know is then
taken from the trace: the process is what is reserved and the card's context, and a step takes as long as the roofline says.
"""

import dataclasses
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.rows import Row
from benchmarks.gpu.workload import train
from tightfit.calibration.nvml_ctypes import Nvml, ProcessMemory

NUM_STEPS = 3  # as many as are traced
_MAX_TIMED_STEPS, _TIMED_SECONDS = 8, 3.0
_SAMPLE_SECONDS = 0.01
_MAX_RECORDED_EVENTS = 4_000_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The peaks of a run and the median time of its later steps; with `failed`, it ran out of memory.

    `process_bytes` is what the driver says that the process holds, None where it cannot be asked. `num_retries` counts how often the allocator had to give
    its cache back before it got memory.
    """

    failed: bool
    allocated_bytes: int
    reserved_bytes: int
    process_bytes: int | None
    seconds_per_step: float | None
    num_retries: int


class ProcessPeak:
    """The peak of the process's GPU memory inside of the `with` block, sampled by a thread."""

    def __init__(self) -> None:
        nvml = Nvml.open()
        self._memory = None if nvml is None else ProcessMemory(nvml, os.getpid())
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.num_bytes: int | None = None

    def __enter__(self) -> "ProcessPeak":
        if self._memory is not None:
            self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._is_over.set()
        if self._memory is not None:
            self._thread.join()
            self.sample()

    def sample(self) -> None:
        """Looks now."""
        uuid = str(torch.cuda.get_device_properties(0).uuid)
        held = None if self._memory is None else self._memory.num_bytes(uuid)
        if held is not None:
            self.num_bytes = max(self.num_bytes or 0, held)

    def _watch(self) -> None:
        while not self._is_over.wait(_SAMPLE_SECONDS):
            if torch.cuda.is_initialized():
                self.sample()


def measure(
    row: Row, *, limit_bytes: int | None, recording: Path | None, steps: Iterator[Any] | None = None
) -> Measurement:
    """Runs the row, or the `steps` that stand for it.

    With `limit_bytes`, under torch's limit for what a process may reserve; with `recording`, leaving torch's recording there.
    """
    seconds: list[float] = []
    failed = False
    # The thread that watches ends before steps are timed.
    with ProcessPeak() as process:
        if row.expandable_segments:
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        if limit_bytes is not None:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total))
        if recording is not None:
            torch.cuda.memory._record_memory_history(max_entries=_MAX_RECORDED_EVENTS, context=None)
        steps = steps or train(**row.parameters())
        try:
            for _ in range(NUM_STEPS):
                seconds.append(_seconds(steps))
        except torch.cuda.OutOfMemoryError:
            failed = True
        held = torch.cuda.memory_stats()
    if recording is not None:
        torch.cuda.memory._dump_snapshot(str(recording))
        torch.cuda.memory._record_memory_history(enabled=None)
    elif not failed and limit_bytes is None:
        # The first steps make the optimizer's state and choose kernels.
        seconds = seconds[-1:]
        while len(seconds) < _MAX_TIMED_STEPS and sum(seconds) < _TIMED_SECONDS:
            seconds.append(_seconds(steps))
    return Measurement(
        failed=failed,
        allocated_bytes=held["allocated_bytes.all.peak"],
        reserved_bytes=held["reserved_bytes.all.peak"],
        process_bytes=process.num_bytes,
        seconds_per_step=statistics.median(seconds) if seconds and not failed else None,
        num_retries=held.get("num_alloc_retries", 0),
    )


def _seconds(steps: Iterator[Any]) -> float:
    begin = time.perf_counter()
    next(steps)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def on_virtual_gpu(row: Row, *, device: str, limit_bytes: int | None, recording: Path | None) -> Measurement:
    """The same on the virtual GPU of a card, in a process that is used for nothing else."""
    from tightfit.allocator.settings import AllocatorSettings
    from tightfit.capture.child_process.capture_session import CaptureSession
    from tightfit.recordings.write import write_tape
    from tightfit.simulate.timeline import step_seconds

    session = CaptureSession(device, NUM_STEPS, by_yield=True)

    def watched() -> Iterator[Any]:
        steps = train(**row.parameters())
        while True:
            session.watch.begin_yielded_step()
            next(steps)  # not held here: what a step returns dies when the next one replaces it
            session.watch.end_step()
            yield

    with session.gpu:
        seen = measure(row, limit_bytes=limit_bytes, recording=recording, steps=watched())
    tape = session.tape(target=row.name, versions={"torch": torch.__version__})
    if recording is not None:
        settings = AllocatorSettings.parse("expandable_segments:True" if row.expandable_segments else "")
        write_tape(recording, tape, session.device, settings)
    return dataclasses.replace(
        seen,
        failed=limit_bytes is not None and seen.reserved_bytes > limit_bytes,
        process_bytes=seen.reserved_bytes + session.device.context_bytes,
        seconds_per_step=step_seconds(tape, session.device)[-1],
    )


def card_here() -> dict[str, Any]:
    """The GPU and the versions of a process that uses it.

    Raises:
        RuntimeError: torch finds no card.
    """
    properties = torch.cuda.get_device_properties(0)
    nvml = Nvml.open()
    return {
        "card": properties.name,
        "total_bytes": properties.total_memory,
        "driver": nvml.driver_version() if nvml else "",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def answer(work: Callable[..., Any], pipe: Any, arguments: dict[str, Any]) -> None:
    """The body of a child process: sends the result of `work`, or one line that says why it failed."""
    try:
        found = work(**arguments)
        pipe.send({"ok": dataclasses.asdict(found) if dataclasses.is_dataclass(found) else found})
    except Exception as error:  # noqa: BLE001 - whatever a run raises is the answer
        pipe.send({"fault": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"})
    pipe.close()
