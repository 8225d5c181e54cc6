"""`tightfit report`: a recording, a saved run or a workload as an HTML page, as tracks for Perfetto, as JSON or as text; a plan as a page."""

import contextlib
import dataclasses
import io
import json as jsonlib
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from tightfit.cli.arguments.options import AS_USUAL, SEVERAL, TraceOptions
from tightfit.cli.shared.progress import ProgressLine
from tightfit.cli.shared.recorded_devices import recorded_index, shown_device
from tightfit.errors import UsageError
from tightfit.errors.missing_files import no_file
from tightfit.output_files import check_outputs, write_text
from tightfit.reports.redacted import redacted, redacted_text
from tightfit.units import format_bytes

if TYPE_CHECKING:
    from tightfit.devices.device import Device
    from tightfit.reports.summary import Summary
    from tightfit.simulate.history import History
    from tightfit.simulate.step_work import PricedTape
    from tightfit.tape import Tape

# The PROTO opcode, with which every pickle of protocol 2 and up begins (pickletools); the file's name may be anything.
_PICKLE = b"\x80"
_SOURCES = (".py", ".npz", ".pickle", ".pkl", ".pt", ".json")
# One GPU for each common size of memory, from 8 GB to 141 GB.
_COMMON_CARDS = ("RTX 4060", "RTX 3060", "RTX 4080", "RTX 4090", "RTX 5090", "L40S", "A100 80GB", "H200")


def report(
    target: str,
    /,
    *arguments: Annotated[str, Parameter(show=False)],
    form: Annotated[str, Parameter(name="--format")] = "html",
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
    device: Annotated[tuple[str, ...], SEVERAL] = (),
    parameter: Annotated[tuple[str, ...], SEVERAL, Parameter(alias="-p")] = (),
    alloc_conf: str | None = None,
    merge: Path | None = None,
    redact: bool = False,
    tracing: TraceOptions = AS_USUAL,
) -> int:
    """Show the memory of a run as an interactive HTML page, or as Perfetto tracks, JSON or text; a plan as an HTML page.

    Parameters
    ----------
    target
        A recording (torch.cuda.memory._dump_snapshot), a trace that estimate --save-tape wrote, a plan that plan -o wrote, or anything that estimate takes.
    form
        html: a page that needs no network; perfetto: counter tracks for ui.perfetto.dev; json: the figures; text: as printed by estimate or replay; or a form that an installed package brings.
    output
        The file to write. Default: the name of the target with another ending; json and text go to stdout.
    device
        A GPU by name or TOML file, that of the run first; repeat it to compare several. With fewer than two, common GPUs are added. cuda:1 is the GPU of a recording to show, by default the one that ran out of memory.
    parameter
        NAME=VALUE, a keyword argument of the generator function; repeatable.
    alloc_conf
        Allocator settings, as in PYTORCH_CUDA_ALLOC_CONF. Default: that variable, or those that were recorded.
    redact
        Write ~ in place of home folders in every path, for a page that is sent to somebody.
    merge
        With --format perfetto: a torch.profiler trace of the same run; the output has its events and the memory tracks.
    """
    from tightfit.reports.forms import writer_of

    write, ending = (None, "") if form in ("json", "text") else writer_of(form)
    if merge is not None and form != "perfetto":
        raise UsageError("--merge needs --format perfetto")
    path = output or (None if write is None else _default_output(target, ending))
    check_outputs({"--output": path}, inputs=(target, merge, *device))
    if _is_plan(target):
        if form != "html" or arguments or parameter or device or alloc_conf is not None:
            raise UsageError(
                f"{target} is a plan: it becomes a page and takes no option but -o (tightfit plan --json has its figures)"
            )
        return _to_file_or_stdout(path, lambda: sys.stdout.write(_plan_page(target, redact=redact)))
    is_recording = _is_recording(target)
    if is_recording:
        if arguments or parameter:
            raise UsageError(f"{target} is a finished run: it takes no arguments or -p")
        tracing.refuse_for(target)
    # The two clocks can be compared only for a recording: a tape's times are estimates.
    if merge is not None:
        if not is_recording:
            raise UsageError(
                f"--merge needs a recording, and {target} is not one: a prediction has no timestamps to merge by"
            )
        return _to_file_or_stdout(path, lambda: sys.stdout.write(_merged(target, merge)), redact=redact)
    tape = None if is_recording else _tape(target, arguments, device, parameter, tracing)
    if redact:
        # Before anything is laid out, so that columns keep their widths.
        tape = redacted(tape)
    if form == "text":
        return _to_file_or_stdout(path, lambda: _text(target, tape, device, alloc_conf), redact=redact)
    history, summary = _recorded(target, device, alloc_conf) if tape is None else _estimated(tape, device, alloc_conf)
    if redact:
        history, summary = redacted(history), redacted(summary)
    if write is None:
        return _to_file_or_stdout(path, lambda: print(jsonlib.dumps(summary.to_json())))
    return _to_file_or_stdout(path, lambda: sys.stdout.write(write(history, summary)))


def _merged(target: str, profile: Path) -> str:
    from tightfit.diagnosis.histories import device_of, history_of_recording
    from tightfit.recordings.read import read_recording
    from tightfit.reports.perfetto import merged

    recording = read_recording(target)
    # torch.profiler's clock is Unix time, as the recording's is, which is what the two are merged by.
    times = device_of(recording, None).time_us
    text, overlaps = merged(history_of_recording(recording), profile, began_us=int(times[0]) if len(times) else 0)
    if not overlaps:
        sys.stderr.write(f"tightfit: {profile} and {target} do not overlap in time; are they from the same run?\n")
    return text


def _is_plan(target: str) -> bool:
    """Whether `target` is a file that `tightfit plan -o` could have written, whatever its name; other JSON files are model configs."""
    path = Path(target)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        if file.read(1) != b"{":
            return False
    with contextlib.suppress(ValueError):
        value = jsonlib.loads(path.read_bytes())
        return isinstance(value, dict) and {"schema", "choices", "frontier"} <= set(value)
    return False


def _plan_page(target: str, *, redact: bool) -> str:
    from tightfit.planner.plan import Plan
    from tightfit.reports.html.plan_page import plan_page

    plan = Plan.load(target)
    return plan_page(redacted(plan) if redact else plan)


def _is_recording(target: str) -> bool:
    path = Path(target)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(1) == _PICKLE


def _tape(
    target: str, arguments: Sequence[str], device: Sequence[str], parameter: Sequence[str], tracing: TraceOptions
) -> "Tape":
    from tightfit import fit
    from tightfit.capture.targets.target_files import refuse_other_files
    from tightfit.cli.shared.local_cards import name_of, seen_cards
    from tightfit.tape.load import read_tape

    if target.endswith(".npz"):
        if arguments or parameter:
            raise UsageError(f"{target} is a finished run: it takes no arguments or -p")
        tracing.refuse_for(target)
        if not Path(target).is_file():
            raise UsageError(no_file(target))
        return read_tape(target)
    refuse_other_files(target)
    cards = list(device) or [name_of(card) for card in seen_cards()[:1]]
    if not cards:
        raise UsageError('which GPU? There is none on this machine: name one, such as --device "RTX 4090"')
    is_rewritten = not tracing.show_output
    with ProgressLine(f"report {target}", timeout_seconds=tracing.timeout, is_rewritten=is_rewritten) as line:
        return fit.capture(
            target,
            device=cards[0],
            arguments=arguments,
            parameters=parameter,
            tracing=tracing,
            on_progress=line.report,
        )


def _known_card(name: str) -> "Device | None":
    """The GPU of that name in the catalogue; None for a recording that calls it `cuda:0`."""
    from tightfit.devices.catalogue import find
    from tightfit.errors import UnknownDevice

    try:
        return find(name)
    except UnknownDevice:
        return None


def _cards(own: "Device | None", names: Sequence[str]) -> "list[Device]":
    """The GPUs to compare: those that were named, `own` first, and the common ones where fewer than two were."""
    from tightfit.devices.catalogue import find

    cards = [find(name) for name in names]
    if len(cards) < 2:
        # So that the page compares at least a few GPUs without being asked to.
        cards += sorted((find(name) for name in _COMMON_CARDS), key=lambda card: card.capacity_bytes)
    if own is not None:
        cards.insert(0, own)
    # Without duplicates, in the order of their first appearance.
    return list({card.name: card for card in cards}.values())


def _estimated(tape: "Tape", names: Sequence[str], alloc_conf: str | None) -> "tuple[History, Summary]":
    from tightfit import fit
    from tightfit.cost.steps import step_operators
    from tightfit.devices.catalogue import find
    from tightfit.diagnosis.histories import history_of_tape
    from tightfit.reports.summary import fit_of_estimate, summarize
    from tightfit.simulate.step_tracks import step_tracks

    settings, own = fit.allocator_settings(alloc_conf), find(names[0] if names else tape.traced_for)
    history = history_of_tape(tape, own, settings)
    if step_operators(tape):
        history = dataclasses.replace(history, step_tracks=step_tracks(_prices(tape, own), own))
    cards = [fit_of_estimate(fit.cost(tape, card, settings)) for card in _cards(own, names)]
    return history, summarize(history, cards=cards, versions=tape.versions, not_seen=tape.coverage.words)


def _prices(tape: "Tape", card: "Device") -> "PricedTape":
    """The prices of an estimate's seconds."""
    from tightfit.devices.nodes import node_of
    from tightfit.simulate.contention import with_contention
    from tightfit.simulate.step_work import priced

    return with_contention(priced(tape, card, node=node_of(card) if tape.num_ranks > 1 else None))


def _recorded(target: str, names: Sequence[str], alloc_conf: str | None) -> "tuple[History, Summary]":
    from tightfit.allocator.settings import AllocatorSettings
    from tightfit.diagnosis.histories import history_of_recording
    from tightfit.recordings.read import read_recording
    from tightfit.reports.summary import fit_of_recording, summarize

    recording = read_recording(target)
    shown = shown_device(recording, names)
    names = [name for name in names if recorded_index(name) is None]
    settings = None if alloc_conf is None else AllocatorSettings.parse(alloc_conf)
    history = history_of_recording(recording, shown, settings=settings)
    return history, summarize(
        history, cards=[fit_of_recording(history, card) for card in _cards(_known_card(history.device), names)]
    )


def _text(target: str, tape: "Tape | None", names: Sequence[str], alloc_conf: str | None) -> None:
    from tightfit import fit
    from tightfit.cli.replay import replay
    from tightfit.devices.catalogue import find
    from tightfit.reports.text import estimates as text

    if tape is None:
        replay(Path(target), alloc_conf=alloc_conf)
        return
    started, settings = time.monotonic(), fit.allocator_settings(alloc_conf)
    estimates = [fit.cost(tape, find(name), settings) for name in (names or [tape.traced_for])]
    elapsed_seconds = time.monotonic() - started
    if len(estimates) == 1:
        text.write_estimate(estimates[0], elapsed_seconds=elapsed_seconds)
    else:
        text.write_comparison(estimates, elapsed_seconds=elapsed_seconds)


def _to_file_or_stdout(output: Path | None, show: Callable[[], object], *, redact: bool = False) -> int:
    if output is None and not redact:
        show()
        return 0
    said = io.StringIO()
    # `show` prints, as the commands estimate and replay do; a file gets the same text.
    with contextlib.redirect_stdout(said):
        show()
    text = redacted_text(said.getvalue()) if redact else said.getvalue()
    if output is None:
        sys.stdout.write(text)
    else:
        _write(output, text)
    return 0


def _default_output(target: str, ending: str) -> Path:
    """`runs/train.pickle` becomes `train.html`, here; `train.py:workload` becomes `train-workload.html`."""
    name, _, function = Path(target).name.partition(":")
    stem = name.removesuffix(Path(name).suffix) if Path(name).suffix in _SOURCES else name
    return Path(re.sub(r"[^\w.-]+", "-", f"{stem}-{function}" if function else stem) + ending)


def _write(path: Path, content: str) -> None:
    """Writes the file atomically and logs it on stderr."""
    existed = path.exists()
    write_text(path, content)
    verb = "replaced" if existed else "wrote"
    sys.stderr.write(f"{verb} {path} ({format_bytes(path.stat().st_size)})\n")
