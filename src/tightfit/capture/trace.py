"""Traces a target in a child process and returns its tape.

The child simulates a card, and a fault inside autograd can abort an interpreter; in a child that becomes one clear error. A program that
comes to no step is ended too.
"""

import collections
import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tightfit import errors
from tightfit.capture.child_process import program_stdin, trace_server
from tightfit.capture.child_process.child import BATCHES_DIFFER, TURNS_DIFFER
from tightfit.capture.collectives.rank_traces import RankTraces
from tightfit.capture.collectives.world import World
from tightfit.capture.processes.children import shared_folder
from tightfit.capture.processes.containment.policy import CLOSED, Policy, contained
from tightfit.capture.processes.containment.written import dropped_notes
from tightfit.capture.processes.fork_server import NO_ROOM, NOT_CLOSED_IN, ForkedChild, forked_child
from tightfit.capture.processes.trace_progress import StatusReader, TraceProgress, user_place
from tightfit.capture.targets.target_kinds import HuggingFaceConfig, Target, words_of
from tightfit.capture.trace_settings import DEFAULT_NUM_STEPS, DEFAULT_TIMEOUT_SECONDS
from tightfit.errors.faults import answering, kept_file
from tightfit.errors.program_errors import says_of_a_thread
from tightfit.tape import Assumption, Coverage, Tape
from tightfit.tape.allocated_bytes import allocated_bytes
from tightfit.tape.left_out import with_left_out
from tightfit.tape.verify import verify_tape

_SECONDS_BETWEEN_LOOKS = 0.25
_MIN_FREE_BYTES = 1 << 20
"""With less in the folder for temporary files, that it is full is what kept a program from being closed in."""
_programs_with_threads: set[str] = set()
"""Targets that were seen to use the GPU in threads of their own; a plan traces the same one several times."""
_programs_that_differ: collections.defaultdict[str, collections.Counter[str]] = collections.defaultdict(
    collections.Counter
)
"""Of targets with a micro-batch, or a turn of `generate`, that was taken for one like those before, and was not: how often that was seen."""
ALIKE_TURNS = (3, 20, 0)
"""So many turns of `generate` must be alike before others are left out, in the first trace and in the next ones where they differ later; 0: all are run. Kernels
round lengths up to 8 or 16, so that three turns may look alike whose next is not."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """A call in the child before the workload starts: `function` ("package.module:name") is called with `argument`, plain JSON.

    It returns a function that is called when the workload is over, and whose result, plain JSON too, is the trace's report.
    """

    function: str
    argument: Any
    imports: tuple[str, ...] = ()
    """Modules, and functions of them that are called ("package.module:name"), which traces have imported before their processes are forked: once for all
    traces. Torch is torch's own then, and nothing in them may have taken a name that a trace replaces."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A tape, the report of the preparation (None without one), and how many examples the program's loaders read, by the size of their batches.
    `predicts_with_gradients`: the program has called models with gradients enabled, and had none computed.
    """

    tape: Tape
    report: Any
    num_examples: Mapping[int, int]
    predicts_with_gradients: bool = False


def trace(
    target: Target,
    *,
    label: str,
    device: str,
    num_steps: int = DEFAULT_NUM_STEPS,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    show_output: bool = False,
    meanwhile: Callable[[], object] | None = None,
    on_progress: Callable[[TraceProgress], None] | None = None,
    preparation: Preparation | None = None,
    with_effects: bool = False,
    used_bytes: int = 0,
    follows: Coverage | None = None,
    until: tuple[str, int] | None = None,
    largest_batch_from: int | None = None,
    policy: Policy = CLOSED,
    world: World | None = None,
    ranks: RankTraces | None = None,
    runs_all_batches: bool = False,
    runs_all_turns: bool = False,
) -> Traced:
    """The tape of `num_steps` steps of `target` on a virtual `device`, a name of the catalogue or the path of a card's TOML file.

    A script is traced beyond its steps (`tightfit.capture.after_steps`), within a bound, or where the trace with the coverage `follows` ended; or
    until a line of a file, an absolute path, is reached. After `largest_batch_from` steps data loaders give their largest batch.
    `policy` says what the program may do to this machine; by default what it writes is dropped, and it reaches no network. `used_bytes` are held by
    other processes, and not free to a program that asks. `meanwhile` is called once while the child runs, `on_progress` a few times a second.
    `world`: the target is a distributed program, of which one process is traced; `ranks` keeps what others send it, for the trace of another one. `with_effects`: the tape also has the side effects of modules and accesses to gradients.
    `runs_all_batches` and `runs_all_turns`: micro-batches, and turns of `generate`, that are alike are run too, for a tape that is the same.

    Raises:
        UsageError: `timeout_seconds` is not positive.
        CaptureError: the workload could not be traced; the message says why and where. Or no step of it ended for `timeout_seconds`.
        InternalError: a fault of tightfit itself, in the child.
    """
    if not timeout_seconds > 0:
        raise errors.UsageError(f"timeout is {timeout_seconds:g}: give the seconds to wait for a step, such as 120")
    fields = {
        "target": {"kind": type(target).__name__, **dataclasses.asdict(target)},
        "label": label,
        "device": device,
        "num_steps": num_steps,
        "timeout_seconds": timeout_seconds,
        "show_output": show_output,
        "preparation": None if preparation is None else dataclasses.asdict(preparation),
        "with_effects": with_effects,
        "used_bytes": used_bytes,
        "follows": None if follows is None else follows.to_json(),
        "until": until,
        "largest_batch_from": largest_batch_from,
        "standard_input": program_stdin.file_given(),
        # A technique may do something else in the last micro-batch of a step, and another process what depends on the number of those before.
        "runs_all_batches": runs_all_batches or world is not None,
        "runs_all_turns": runs_all_turns or world is not None,
    }

    def once(world: World | None) -> Traced:
        return _with_threads(
            target,
            {**fields, "world": None if world is None else dataclasses.asdict(world)},
            policy,
            on_progress,
            meanwhile,
        )

    if world is None or world.num_ranks == 1:
        return once(world)
    traced = (RankTraces() if ranks is None else ranks).trace(once, world)
    assert isinstance(traced, Traced)
    return traced


def _with_threads(
    target: Target,
    fields: dict[str, Any],
    policy: Policy,
    on_progress: Callable[[TraceProgress], None] | None,
    meanwhile: Callable[[], object] | None,
) -> Traced:
    """One trace, and another one that follows threads where the program turns out to use the GPU in some."""
    program = repr(target)
    if program not in _programs_with_threads:
        try:
            return _with_alike_parts(target, fields, policy, on_progress, meanwhile)
        except errors.ProgramError as error:
            if not says_of_a_thread(str(error)):
                raise
        # Threads that take turns are not quite what the program has, so only one that needs it is traced so.
        _programs_with_threads.add(program)
    return _attempt(
        {**fields, "follows_threads": True, "runs_all_batches": True, "runs_all_turns": True, "num_alike_turns": 0},
        target,
        policy,
        on_progress,
    )


def _with_alike_parts(
    target: Target,
    fields: dict[str, Any],
    policy: Policy,
    on_progress: Callable[[TraceProgress], None] | None,
    meanwhile: Callable[[], object] | None,
) -> Traced:
    """One trace, and others where micro-batches, or turns of `generate`, that looked alike turn out to differ: all batches are run then, and more turns, and at last all."""
    program = repr(target)
    while True:
        differing = _programs_that_differ[program]
        num_alike_turns = (
            0 if fields["runs_all_turns"] else ALIKE_TURNS[min(differing[TURNS_DIFFER], len(ALIKE_TURNS) - 1)]
        )
        runs_all_batches = fields["runs_all_batches"] or differing[BATCHES_DIFFER] > 0
        asked = {**fields, "runs_all_batches": runs_all_batches, "num_alike_turns": num_alike_turns}
        try:
            return _attempt(asked, target, policy, on_progress, meanwhile)
        except errors.CaptureError as error:
            if str(error) not in (BATCHES_DIFFER, TURNS_DIFFER):
                raise
            differing[str(error)] += 1
        meanwhile = None


def _attempt(
    fields: dict[str, Any],
    target: Target,
    policy: Policy,
    on_progress: Callable[[TraceProgress], None] | None,
    meanwhile: Callable[[], object] | None = None,
) -> Traced:
    """One trace of `target`, by a child that is given `fields`."""
    label = fields["label"]
    with shared_folder() as folder:
        request, tape = folder / "request.json", folder / "tape.npz"
        containment = contained(policy, folder, words_of(target))
        closed_in = None if containment is None else dataclasses.asdict(containment)
        asked = {name: value for name, value in fields.items() if name != "runs_all_turns"}
        request.write_text(json.dumps({**asked, "tape": str(tape), "containment": closed_in}))
        with forked_child(
            "tightfit.capture.child_process.child",
            request,
            environment=trace_server.trace_environment(policy, fields["world"]),
            reads_errors=not fields["show_output"],
            preloaded=trace_server.preloaded(
                is_huggingface=isinstance(target, HuggingFaceConfig),
                program=trace_server.program_of(target, fields["world"]),
            ),
            containment=containment,
            imports=(*trace_server.imports_of(target), *(fields["preparation"] or {}).get("imports", ())),
        ) as process:
            if meanwhile is not None:
                meanwhile()
            said = _output(process, StatusReader(str(request), process.send_signal), on_progress)
        if not Path(f"{request}.answer").exists():
            stack = Path(f"{request}.stack")
            where = stack.read_text(errors="replace") if stack.exists() else ""
            if where:
                follows = bool(fields.get("follows_threads"))
                raise errors.CaptureError(no_step(label, where, fields["timeout_seconds"], takes_turns=follows))
            raise errors.CaptureError(_death(label, process.wait(), said))
        result = _answer(request)
        # Keys of JSON are strings.
        num_examples = {int(size): number for size, number in result["num_examples"].items()}
        noted = _noted(with_left_out(Tape.load(tape)), result["notes"], folder)
        traced = Traced(
            tape=noted,
            report=result["report"],
            num_examples=num_examples,
            predicts_with_gradients=result["predicts_with_gradients"],
        )
        with answering("the capture"):
            faults = verify_tape(traced.tape)
            assert not faults, faults[0]
        return traced


def _answer(request: Path) -> dict[str, Any]:
    """What the child has answered; raises its error if that is one."""
    result = json.loads(Path(f"{request}.answer").read_text())
    if not result["ok"]:
        error = getattr(errors, result["kind"])(result["message"], **result["details"])
        error.trace = result["trace"]
        raise kept_file(error)
    return result


def _output(
    process: "ForkedChild | subprocess.Popen[bytes]",
    status: StatusReader,
    on_progress: Callable[[TraceProgress], None] | None,
) -> str:
    """What the child has written to stderr, once it has ended."""
    while True:
        try:
            said = process.communicate(timeout=None if on_progress is None else _SECONDS_BETWEEN_LOOKS)[1]
        except subprocess.TimeoutExpired:
            progress = status.read()
            if on_progress is not None and progress is not None:
                on_progress(progress)
        else:
            return (said or b"").decode(errors="replace")


def _noted(tape: Tape, notes: Iterable[tuple[str, str]], folder: Path) -> Tape:
    """The tape that also says what the program was kept from."""
    own = [Assumption(where=where, what=what) for where, what in (*notes, *dropped_notes(folder))]
    return dataclasses.replace(tape, assumptions=(*tape.assumptions, *own))


def no_step(label: str, said: str, timeout_seconds: float, *, takes_turns: bool = False) -> str:
    """The error message for a program that has not come to its next step; `said` is faulthandler's output, the main thread last.

    `takes_turns`: the program's threads were traced in turns.
    """
    place = user_place(said)
    where = f"; it was at {place}" if place else ""
    of_others, _, _ = said.rpartition("\n\n")
    if takes_turns and (other := user_place(of_others)):
        return (
            f"{label}: no step ended within {timeout_seconds:g} s{where}, while a thread of its own was at {other}: in a trace a thread runs until it waits "
            "for another one, so a thread that never waits keeps the others from running; leave it out, at least while it is traced"
        )
    return f"{label}: no step ended within {timeout_seconds:g} s{where}; if it only needs more time, give it --timeout SECONDS"


def _is_full(folder: str) -> bool:
    return shutil.disk_usage(folder).free < _MIN_FREE_BYTES


def _death(label: str, code: int, said: str) -> str:
    why = said.strip().rpartition("\n")[2]
    # The kernel says the same of too many namespaces.
    is_full = os.strerror(errno.ENOSPC) in why and _is_full(tempfile.gettempdir())
    if code == NOT_CLOSED_IN and not is_full:
        return f"{label} could not be isolated on this machine ({why or 'see above'}); set TIGHTFIT_CONTAINMENT=python, or give --allow-writes and --allow-network"
    if code in {NO_ROOM, NOT_CLOSED_IN}:
        return (
            f"the trace of {label} could not be written to the folder for temporary files, {tempfile.gettempdir()} ({why or 'it is full'}); "
            "set TMPDIR to a folder with room, also for what the program writes"
        )
    reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    # SIGKILL is what the kernel's out-of-memory killer sends.
    hint = " (out of host memory?)" if code == -signal.SIGKILL else ""
    place = user_place(said)
    where = f" at {place}" if place else ""
    return f"the process that traced {label} died with {reason}{hint}{where}; run again with --show-output to see what it printed last"


def saved_without_gradients(tape: Tape, trace_again: Callable[[Preparation], Traced]) -> int | None:
    """By how much the allocated bytes at the peak of `tape` fall where the program computes without gradients; None where that could not be seen, as it does not run
    so, or enables them itself."""
    try:
        without = trace_again(
            Preparation(function="tightfit.runtime.trace_without_gradients:prepare", argument=None)
        ).tape
    except errors.TightfitError:
        return None
    saved = int(allocated_bytes(tape).max() - allocated_bytes(without).max())
    return saved if saved > 0 else None
