"""The process that a workload is traced in. It reads a request file, and writes a tape or an error of one line.

    python -m tightfit.capture.child_process.child REQUEST.json PARENT

It patches torch throughout to simulate a card, so it is used for one capture and then ends.
"""

import dataclasses
import faulthandler
import importlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tightfit.capture.child_process import early_end, program_stdin
from tightfit.capture.child_process.time_after_steps import TimeAfterSteps
from tightfit.capture.collectives.world import World
from tightfit.capture.patches import manifest, nvidia_smi
from tightfit.capture.processes import process_role, visible_devices
from tightfit.capture.processes.children import die_with_parent
from tightfit.capture.processes.containment.closed_in import ClosedIn
from tightfit.capture.processes.fork_server import NO_ROOM
from tightfit.capture.processes.trace_progress import StatusFile
from tightfit.capture.replace import replace
from tightfit.capture.targets.huggingface.target import LEFT_OPEN
from tightfit.capture.targets.target_kinds import GeneratorFunction, HuggingFaceConfig, Script, Target
from tightfit.errors import CaptureError, ProgramError, TightfitError, apply_error, faults
from tightfit.errors import program_errors as programs
from tightfit.tape import Coverage

if TYPE_CHECKING:
    from tightfit.capture.child_process.capture_session import CaptureSession
    from tightfit.capture.steps.detector import StepWatch

_end_process = os._exit
_MOST_BYTES_SAID = 4096
# What parsers of arguments (argparse, click) exit with.
_CODE_OF_USAGE = 2
# As rich draws them, also where only ASCII can be printed.
_TOPS_OF_BOXES, _ENDS_OF_BOXES, _SIDES_OF_BOXES = "╭┌+", "╰└+", "│┃| "
BATCHES_DIFFER = "micro-batches that looked alike turned out to differ"
TURNS_DIFFER = "turns of a loop that looked alike turned out to differ"
"""The messages of errors that only whoever asked for the trace sees."""
_REPORTED_PACKAGES = ("transformers", "accelerate", "peft", "diffusers", "lightning", "torchvision", "timm")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The request to the child. `device` is a name of the catalogue or a path; `target` is a `Target` as a dict with its `kind`,
    `world` a `tightfit.capture.collectives.world.World` as a dict, `runs_all_batches`: micro-batches that are alike are run too, `num_alike_turns`: so many turns of `generate` must be alike before others are left out (0: all are run), `preparation` a `tightfit.capture.trace.Preparation` as a dict.
    """

    target: dict[str, Any]
    label: str
    device: str
    num_steps: int
    tape: str
    timeout_seconds: float
    show_output: bool
    preparation: dict[str, Any] | None
    containment: dict[str, Any] | None = None
    with_effects: bool = False
    used_bytes: int = 0
    follows: dict[str, Any] | None = None
    until: list[Any] | None = None
    largest_batch_from: int | None = None
    follows_threads: bool = False
    runs_all_batches: bool = True
    num_alike_turns: int = 0
    world: dict[str, Any] | None = None
    standard_input: list[Any] | None = None


def main(path: str, parent: str) -> None:
    """Runs the request at `path` and ends the process; the process also ends as soon as `parent` does."""
    die_with_parent(int(parent))
    request = Request(**json.loads(Path(path).read_text()))
    answer: dict[str, Any]
    last_line: Callable[[], str] = str
    sys.unraisablehook = _note_unraisable
    closed_in = ClosedIn(request.containment)
    in_threads = threading.excepthook

    def thread_failed(failed: threading.ExceptHookArgs) -> None:
        # The program may wait for ever for what such a thread does not bring.
        if failed.exc_value is not None and programs.is_of_a_thread(failed.exc_value):
            leave(path, {**_failure(request.label, failed.exc_value, ""), "notes": closed_in.end()})
        in_threads(failed)

    threading.excepthook = thread_failed
    _look_at_futures(thread_failed)
    try:
        with quiet(request.show_output) as last_line:
            answer = {"ok": True, **_trace(request, path, closed_in), "num_examples": _num_examples()}
    except BaseException as error:  # noqa: BLE001 - whatever the user's code raises is the answer
        answer = _failure(request.label, error, last_line())
        answer["message"] += closed_in.hint(error)
    left_open = [("", what) for what in dict.fromkeys(LEFT_OPEN)]
    answer["notes"] = [*left_open, *closed_in.end()]
    leave(path, answer)


def _look_at_futures(thread_failed: Callable[[threading.ExceptHookArgs], None]) -> None:
    """Errors in the tasks of pools end their threads no more than the program: a future has them, which nobody may ask."""
    set_exception = Future.set_exception

    def noted(future: "Future[Any]", error: BaseException | None) -> None:
        if error is not None and programs.is_of_a_thread(error):
            thread_failed(threading.ExceptHookArgs((type(error), error, error.__traceback__, None)))
        set_exception(future, error)

    replace(Future, set_exception=noted)


def leave(path: str, answer: dict[str, Any]) -> NoReturn:
    """Ends the process with the answer to the request at `path`."""
    try:
        _write(path, answer)
    except OSError as error:
        no_room(f"{path}.answer", error)
    # Neither the program's threads and exit handlers nor the teardown of an interpreter whose torch was patched
    # may change the answer, or keep the process alive.
    _end_process(0)


def _write(path: str, answer: dict[str, Any]) -> None:
    """Several threads may fail at once, and the first that is done ends the process: the answer is there as a whole, or not at all."""
    own = Path(f"{path}.answer.{os.getpid()}.{threading.get_ident()}")
    try:
        own.write_text(json.dumps(answer))
        own.replace(f"{path}.answer")
    except OSError:
        own.unlink(missing_ok=True)
        raise


def no_room(file: str, error: OSError) -> NoReturn:
    """Ends the process without an answer, since it cannot be written."""
    Path(file).unlink(missing_ok=True)
    # What is said may go to a file in the same folder.
    with suppress(OSError):
        os.write(2, f"{error.strerror}\n".encode())
    _end_process(NO_ROOM)


def _differ(message: str, path: str, closed_in: ClosedIn) -> NoReturn:
    """Ends the process: this trace is not that of the program, and another one that runs all batches, or turns, is."""
    answer = {"ok": False, "kind": CaptureError.__name__, "message": message, "details": {}, "trace": ""}
    leave(path, {**answer, "notes": closed_in.end()})


def _num_examples() -> dict[int, int]:
    from tightfit.capture.patches.loading import loaders

    return loaders.num_examples


def _failure(label: str, error: BaseException, said: str) -> dict[str, Any]:
    """The answer after `error` ended the trace: our own error, even if the program converted it into another one, or else the program's. `said` is the
    last line that the program has written to stderr."""
    own: TightfitError | None = faults.noted() or apply_error() or faults.our_error(error, "the capture")
    if own is None:
        if isinstance(error, SystemExit):
            own = CaptureError(ended_itself(label, error.code, said) + programs.assumed(error) + program_stdin.hint())
        else:
            line = programs.one_line(label, error)
            own = ProgramError(line if programs.NO_STDIN in line else line + program_stdin.hint())
            own.trace = programs.program_trace(error)
    details = {name: value for name, value in vars(own).items() if name != "trace" and not name.startswith("__")}
    trace = own.trace or "".join(traceback.format_exception(error))
    return {"ok": False, "kind": type(own).__name__, "message": str(own), "details": details, "trace": trace}


def _note_unraisable(unraisable: Any) -> None:
    """Python drops exceptions in callbacks of weak references; an error of ours there would leave a wrong tape."""
    if unraisable.exc_value is not None:
        faults.note(unraisable.exc_value, "the capture")
    sys.__unraisablehook__(unraisable)


def _trace(request: Request, path: str, closed_in: ClosedIn) -> dict[str, Any]:
    """Writes the tape; returns what the answer says besides."""
    try:
        # First, as what is imported next takes these names at its head.
        manifest.check()
        from tightfit.capture.child_process.capture_session import CaptureSession
        from tightfit.capture.patches import libraries
        from tightfit.capture.steps.token_loops.generate import turns_left_out
        from tightfit.capture.targets import imported_before
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from tightfit.errors import MissingExtra

        raise MissingExtra(
            "tracing runs your code with torch, which is not installed here; install it: pip install 'tightfit[torch]'"
        ) from error
    process_role.begin_trace()
    by_yield = request.target["kind"] != "Script"
    session = CaptureSession(
        request.device,
        request.num_steps,
        by_yield=by_yield,
        with_effects=request.with_effects,
        used_bytes=request.used_bytes,
        follows=None if request.follows is None else Coverage.from_json(request.follows),
        until=None if request.until is None else (request.until[0], request.until[1]),
        world=None if request.world is None else World(**request.world),
        differs=None if request.runs_all_batches else lambda: _differ(BATCHES_DIFFER, path, closed_in),
    )
    if request.largest_batch_from is not None:
        session.give_largest_batches(request.largest_batch_from)
    session.gpu.operators.progress = status = StatusFile(path)
    if request.follows_threads:
        session.follow_threads()
    early_end.provide(lambda error: leave(path, {**_failure(request.label, error, ""), "notes": closed_in.end()}))
    report = prepare(request.preparation)
    where = session.gpu.attribution.where
    program_stdin.install(
        lambda: session.recorder.assume(where(), "standard input, which the program reads, is empty in a trace"),
        request.standard_input,
    )
    _answer_as_nvidia_smi(session, f"{path}.bin")
    visible_devices.show(session.num_cards)
    closed_in.begin()
    # All that answers for the card is in its place now.
    imported_before.exchange()
    _refuse_in_forks(session, request.label, path)
    alike_turns = turns_left_out(
        session.gpu,
        request.num_alike_turns,
        libraries.answer_at_import,
        lambda: bool(session.watch.optimizers),
        lambda: _differ(TURNS_DIFFER, path, closed_in),
    )
    with _steps_in_time(session.watch, request.timeout_seconds, f"{path}.stack", status), _exits_seen(), alike_turns:
        session.run(target_of(request.target))
    raise_what_was_swallowed()
    if session.gpu.fake.used_in_a_thread is not None:
        raise session.gpu.fake.used_in_a_thread
    tape = session.tape(target=request.label, versions=_versions())
    try:
        tape.save(request.tape)
    except OSError as error:
        no_room(f"{request.tape}", error)
    return {"report": report(), "predicts_with_gradients": session.watch.predicts_with_gradients}


def _answer_as_nvidia_smi(session: "CaptureSession", folder: str) -> None:
    import torch

    free_bytes, _ = torch.cuda.mem_get_info()
    nvidia_smi.install(
        folder,
        name=session.device.name,
        nominal_bytes=session.device.nominal_bytes,
        free_bytes=free_bytes,
        compute_capability=session.device.compute_capability,
    )


def _refuse_in_forks(session: "CaptureSession", label: str, path: str) -> None:
    """A process that the program forks has a copy of the trace, which leads nowhere: where it uses the GPU, the trace ends with an error."""
    if sys.platform == "win32":
        return
    traced = os.getpid()

    def refuse(*_: object) -> NoReturn:
        where = session.gpu.attribution.where()
        error = CaptureError(
            f"{where} uses the GPU in a forked process, and a trace follows only the main process: run that code in the main process, at least while it is traced"
        )
        _write(path, {**_failure(label, error, ""), "notes": []})
        # The traced process may wait for this one.
        os.kill(traced, signal.SIGKILL)
        os._exit(1)

    # The trace has a thread of its own, of which Python 3.12 and newer warn whoever forks.
    warnings.filterwarnings("ignore", r"This process \(pid=\d+\) is multi-threaded", DeprecationWarning)
    os.register_at_fork(after_in_child=lambda: setattr(session.recorder, "operator", refuse))


@contextmanager
def _steps_in_time(watch: "StepWatch", timeout_seconds: float, path: str, status: StatusFile) -> Iterator[None]:
    """Ends the process if no step ends within `timeout_seconds`, and writes the stacks of all threads to the file at `path`."""
    time_after = TimeAfterSteps(watch=watch, timeout_seconds=timeout_seconds, began=time.monotonic())
    with open(path, "w") as file:

        def expect_a_step() -> None:
            # The thread that waits runs no Python, so nothing that the program does can keep it.
            faulthandler.dump_traceback_later(timeout_seconds, file=file, exit=True)
            status.step(watch.num_ended)

        def expect_the_end() -> None:
            if sys.platform == "win32":
                return
            # After the steps a program that takes too long is no error: the tape has what came before.
            watch.on_step = lambda: None
            faulthandler.dump_traceback_later(2 * timeout_seconds, file=file, exit=True)
            take_alarms()
            time_after.begin()

        def take_alarms() -> None:
            # Where optimizers step in hooks of a backward pass, the last step may end in a thread of torch's, in which no handler can be set.
            if sys.platform != "win32" and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGALRM, lambda _, frame: time_after.alarm(frame))

        watch.on_step = expect_a_step
        if watch.after is not None:
            watch.after.on_begin = expect_the_end
            take_alarms()
        expect_a_step()
        traced = os.getpid()
        try:
            yield
        finally:
            if os.getpid() != traced:
                # One that the program has forked comes to its end: the trace is not its own, nor is what waits for a step.
                ended = sys.exc_info()[1]
                code = ended.code if isinstance(ended, SystemExit) else ended and 1
                os._exit(code if isinstance(code, int) else int(code is not None))
            faulthandler.cancel_dump_traceback_later()
            if sys.platform != "win32":
                signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def _exits_seen() -> Iterator[None]:
    """A program that ends its process by `os._exit` has ended, like one that ends otherwise; processes that it has forked end by it."""
    traced, main_thread = os.getpid(), threading.main_thread()

    def end(status: int = 0) -> NoReturn:
        if os.getpid() == traced and threading.current_thread() is main_thread:
            raise SystemExit(status)
        _end_process(status)

    os._exit = end
    try:
        yield
    finally:
        os._exit = _end_process


def raise_what_was_swallowed() -> None:
    """Raises an error of ours that the program has caught: it has run without what was asked for, so its tape is not the answer."""
    swallowed = faults.noted() or apply_error()
    if swallowed is not None:
        raise swallowed


def prepare(preparation: dict[str, Any] | None) -> Callable[[], Any]:
    """Runs a `tightfit.capture.trace.Preparation`; the function that is returned gives its report when the run is over."""
    if preparation is None:
        return lambda: None
    module, _, name = preparation["function"].partition(":")
    return getattr(importlib.import_module(module), name)(preparation["argument"])


def target_of(fields: dict[str, Any]) -> Target:
    """The target from its fields, with its `kind`, in a request."""
    kinds: dict[str, Any] = {c.__name__: c for c in (Script, GeneratorFunction, HuggingFaceConfig)}
    return kinds[fields["kind"]](**{k: v for k, v in fields.items() if k != "kind"})


def _versions() -> dict[str, str]:
    import torch

    from tightfit.capture.patches.libraries import version_of

    versions = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
    }
    for package in _REPORTED_PACKAGES:
        if package in sys.modules:
            versions[package] = version_of(package)
    return versions


@contextmanager
def quiet(show_output: bool) -> Iterator[Callable[[], str]]:
    """The script's own output goes to stderr, or nowhere: stdout belongs to the answer. Yields a function for the last line that it has written to
    stderr, which is empty where the output is shown."""
    # A fault inside autograd ends the process without an exception: its traceback goes to the real stderr, from
    # which the parent names the line (`processes.trace_progress.user_place`).
    faulthandler.enable(os.dup(2))
    sink = os.dup(2) if show_output else os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    if show_output:
        os.dup2(sink, 2)
        yield lambda: ""
    else:
        with tempfile.TemporaryFile() as file:
            os.dup2(file.fileno(), 2)
        # Whatever the program does with its own.
        kept = os.dup(2)
        yield lambda: _last_line(kept)
    sys.stdout.flush()


def _last_line(file: int) -> str:
    sys.stderr.flush()
    end = os.pread(file, _MOST_BYTES_SAID, max(0, os.fstat(file).st_size - _MOST_BYTES_SAID))
    return line_that_says_most(end.decode(errors="replace").splitlines())


def line_that_says_most(lines: Sequence[str]) -> str:
    """The error of the last traceback that a program has printed, which may add a hint of its own behind it (hydra); else its last line, or what its last box has in it (typer)."""
    begins = [number for number, line in enumerate(lines) if line.strip() == "Traceback (most recent call last):"]
    if begins:
        # The lines of a traceback are indented; the error is not.
        behind = (line for line in lines[begins[-1] + 1 :] if line.strip() and not line.startswith((" ", "\t", "|")))
        error = next(behind, "")
        if error:
            return error.strip()
    said = [line.strip() for line in lines if line.strip()]
    if said and said[-1][0] in _ENDS_OF_BOXES:
        tops = [number for number, line in enumerate(said[:-1]) if line[0] in _TOPS_OF_BOXES]
        return " ".join(line.strip(_SIDES_OF_BOXES) for line in said[tops[-1] + 1 if tops else 0 : -1])
    return said[-1] if said else ""


def ended_itself(label: str, code: object, said: str) -> str:
    """What is said of a program that exited with `code`, and `said` that last."""
    # What is no number is printed by Python, which exits with 1.
    has_number = code is None or isinstance(code, int)
    how = f"exit code {code or 0}" if has_number else " ".join(str(code).split())[:_MOST_BYTES_SAID]
    # A parser of arguments says what it does not understand, and exits.
    said = f"; it said: {said}" if said and code and has_number else ""
    if said and code == _CODE_OF_USAGE and not sys.argv[1:]:
        said += "; the program's own arguments go after --"
    return f"{label} exited before its steps were complete: {how}{said} (--show-output shows what it printed)"


if __name__ == "__main__":
    main(*sys.argv[1:])
