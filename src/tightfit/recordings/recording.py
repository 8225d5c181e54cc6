"""Records the memory of a run, with marks: `with tightfit.record("run.pickle"): ...` around the loop of an unmodified program.

On a GPU torch's own recorder is used. Without one, tensors on the host are recorded, and the simulated CUDA allocator decides where torch would
have placed them; such a file has the origin "host". The file is written on leaving the block, also with an exception, which is passed on; the
recording then ends where it was raised.
"""

import dataclasses
import os
import sys
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, Self

from tightfit.errors import MissingExtra, TightfitError, UsageError
from tightfit.errors.faults import internal_error, note
from tightfit.output_files import check_outputs
from tightfit.recordings.marks import Origin
from tightfit.recordings.runs import snapshot_of_card_run, snapshot_of_host_run
from tightfit.recordings.write import write_snapshot
from tightfit.runtime.recorded import CardRun
from tightfit.torch_hooks import manifest

if TYPE_CHECKING:
    from tightfit.runtime.record_card import CardRecorder
    from tightfit.runtime.record_host import HostRecorder

DEFAULT_MAX_EVENTS = 200_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The file that was written, and its contents in figures."""

    path: str
    origin: Origin
    device: str
    num_events: int
    num_steps: int
    num_bytes: int


class ActiveRecording:
    """The context manager that `tightfit.record` returns. `written` is set when the block has been left."""

    # Of the class, because torch has one recorder per process and a second start would end the first recording.
    is_under_way: ClassVar[bool] = False

    def __init__(self, path: str | os.PathLike[str], *, stacks: bool, max_events: int) -> None:
        self.path = os.fspath(path)
        self.written: Written | None = None
        self._file = self.path
        self._stacks = stacks
        self._max_events = max_events
        self._recorder: CardRecorder | HostRecorder | None = None

    @property
    def recorder(self) -> "CardRecorder | HostRecorder":
        """The recorder, inside of the block.

        Raises:
            UsageError: outside of it.
        """
        if self._recorder is None:
            raise UsageError(
                "nothing is being recorded: write `with tightfit.record(PATH) as recording:` around the loop"
            )
        return self._recorder

    def step(self) -> None:
        """Marks the end of a step. Without it, a step ends when an optimizer has stepped."""
        self.recorder.hooks.step()

    def __enter__(self) -> Self:
        if ActiveRecording.is_under_way:
            raise UsageError("a recording is under way already: one process records one run at a time")
        check_outputs({"record": self.path})
        # The program may change its working folder.
        self._file = os.path.abspath(self.path)
        try:
            manifest.check()
            from tightfit.runtime.run_recorder import new_recorder
        except ModuleNotFoundError as error:
            # Another missing module means a broken installation of tightfit.
            if error.name != "torch":
                raise
            raise MissingExtra(
                "recording runs with torch, which is not installed here; pip install 'tightfit[torch]'"
            ) from error
        recorder = self._recorder = new_recorder(stacks=self._stacks, max_events=self._max_events)
        ActiveRecording.is_under_way = True
        try:
            recorder.start()
        except BaseException:
            self._recorder, ActiveRecording.is_under_way = None, False
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        recorder, self._recorder, ActiveRecording.is_under_way = self.recorder, None, False
        try:
            run = recorder.stop()
            # SystemExit and GeneratorExit are ordinary ends of a program.
            was_cut_short = kind is not None and issubclass(kind, Exception | KeyboardInterrupt)
            if isinstance(run, CardRun):
                snapshot, marks = snapshot_of_card_run(run, was_cut_short=was_cut_short)
            else:
                snapshot, marks = snapshot_of_host_run(run, max_events=self._max_events, was_cut_short=was_cut_short)
            num_bytes = write_snapshot(self._file, snapshot)
        except Exception as failure:
            is_known = isinstance(failure, OSError | TightfitError)
            own = failure if is_known else internal_error(failure, "the recording")
            # What the program itself raised must not be hidden by the file that could not be written.
            if error is None and is_known:
                raise
            if error is None:
                raise own from failure
            sys.stderr.write(f"tightfit: the recording could not be written to {self.path}: {own}\n")
            if not is_known:
                note(own, "the recording")
            return
        self.written = Written(
            path=self.path,
            origin=marks.origin,
            device=marks.device,
            num_events=len(snapshot["device_traces"][marks.trace]),
            num_steps=sum(span.kind == "step" for span in marks.spans),
            num_bytes=num_bytes,
        )


def record(
    path: str | os.PathLike[str], *, stacks: bool = True, max_events: int = DEFAULT_MAX_EVENTS
) -> ActiveRecording:
    """Records what runs inside `with record(path):` and writes it to `path`, which torch's viewer and tightfit read.

    With `stacks`, each allocation has the Python stack that made it. The last `max_events` events are kept. A recording of torch's own that was
    running on the GPU ends.

    Raises:
        UsageError: there is no such folder, `max_events` is not positive, or (on entry) a recording is under way already.
    """
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise UsageError(f"{os.fspath(path)}: there is no folder {folder}")
    if max_events < 1:
        raise UsageError(f"max_events is {max_events}: at least one event must be kept")
    return ActiveRecording(path, stacks=stacks, max_events=max_events)
