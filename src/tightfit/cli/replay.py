"""`tightfit replay`: replays a recording of torch's memory allocator, as it ran or with other settings or less memory."""

import json as json_module
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tightfit.cli.arguments.sizes import Size, with_unit
from tightfit.cli.shared.progress import ProgressLine
from tightfit.errors import UsageError
from tightfit.units import format_bytes

if TYPE_CHECKING:
    from tightfit.recordings.read import Recording
    from tightfit.recordings.replayed import OutOfMemory, Replay

_WIDTH = 120


def replay(
    recording: Path,
    /,
    *,
    alloc_conf: str | None = None,
    memory: Size | None = None,
    device: int | None = None,
    tune: bool = False,
    json: bool = False,
) -> int:
    """Replay a recording (torch.cuda.memory._dump_snapshot) through the simulated caching allocator. Exit code 1: it would run out of memory.

    Args:
        recording: the pickle file.
        alloc_conf: settings as in PYTORCH_CUDA_ALLOC_CONF; by default the recorded ones. The cache at the start of the recording is kept.
        memory: limit of reserved memory on each device, such as 22GiB, or 80% where the recording has the capacity of the GPU; by default none.
        device: replay this device only; by default all that have events, and the figures are their sums.
        tune: search the settings that reserve least; those of --alloc-conf get a row. Exit code 1: none fits.
        json: print JSON instead of a table.
    """
    # Here and not above: numpy is not loaded for --help.
    from tightfit.allocator.settings import AllocatorSettings
    from tightfit.errors.missing_files import no_file
    from tightfit.recordings.read import read_recording
    from tightfit.recordings.replayed import devices_of, limit_of, together
    from tightfit.recordings.replayed import replay as replay_device

    if not recording.exists():
        raise UsageError(no_file(str(recording)))
    # With --tune the given settings are one row of the search, and the replay stays as recorded.
    settings = None if alloc_conf is None or tune else AllocatorSettings.parse(alloc_conf)
    limit = None if memory is None else with_unit("--memory", memory)
    with ProgressLine(recording.name) as progress:
        found = read_recording(recording, progress=progress)
        capacity_bytes = limit_of(found, limit, "--memory")
        each = [
            replay_device(found, settings=settings, capacity_bytes=capacity_bytes, device=index, progress=progress)
            for index in devices_of(found, device)
        ]
    if len(each) > 1:
        print(
            f"{len(each)} devices have events: each was replayed separately, and the figures are their sums (--device N: one of them)",
            file=sys.stderr,
        )
    total = together(each)
    tuning = None
    if tune:
        from tightfit.tuning.search_settings import tune as tune_recording

        tuning = tune_recording(
            found,
            alloc_conf=alloc_conf,
            capacity_bytes=capacity_bytes,
            device=device,
            is_windows=sys.platform == "win32",
        )
    if json:
        more: dict[str, Any] = {} if tuning is None else {"tune": tuning.to_json()}
        if len(each) > 1:
            more["devices"] = [{"device": one.device, **one.to_json()} for one in each]
        print(json_module.dumps(total.to_json() | more, indent=2))
    else:
        _print(total, each, found, is_as_recorded=settings is None and capacity_bytes is None)
        if tuning is not None:
            from tightfit.reports.text.tuning import TuningText

            _console().print(TuningText(tuning), soft_wrap=True)
    return 0 if (total.oom is None if tuning is None else tuning.recommended is not None) else 1


def _console() -> Console:
    console = Console(highlight=False)
    # A fixed width, so that piped output is the same on every machine.
    if not console.is_terminal:
        console.width = _WIDTH
    return console


def _print(result: "Replay", each: "Sequence[Replay]", recording: "Recording", *, is_as_recorded: bool) -> None:
    console = _console()
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("events", f"{result.events:,}")
    # A replay with less memory ends where that runs out; the whole run needs more.
    until = "" if result.oom is None or is_as_recorded else " until then"
    for what, num_bytes in (("allocated", result.peak_allocated_bytes), ("reserved", result.peak_reserved_bytes)):
        table.add_row(f"peak {what}{until}", f"{format_bytes(num_bytes)} ({num_bytes:,} bytes)")
    num_segments = sum(result.segments.values())
    mapped_bytes = sum(size * count for size, count in result.segments.items())
    table.add_row("segments allocated during the recording", f"{num_segments:,}, {format_bytes(mapped_bytes)}")
    table.add_row("allocation retries", f"{result.alloc_retries:,}")
    if is_as_recorded:
        table.add_row(
            "recorded segments",
            "equal to the simulated ones, to the byte" if result.agrees else "differ from the simulated ones",
        )
    if result.oom is not None:
        table.add_row("out of memory", _failure(result.oom))
    if len(each) > 1:
        for one in each:
            peaks = f"peak allocated {format_bytes(one.peak_allocated_bytes)}, reserved {format_bytes(one.peak_reserved_bytes)}"
            table.add_row(f"device {one.device}", peaks + ("" if one.oom is None else ", out of memory"))
    console.print(recording.path)
    console.print(table)


def _failure(oom: "OutOfMemory") -> str:
    held = f"{format_bytes(oom.allocated_bytes)} allocated and {format_bytes(oom.reserved_bytes)} reserved"
    if not oom.requested_bytes:
        return f"before the first event: the recording begins with {held}"
    return f"at event {oom.event:,}: {format_bytes(oom.requested_bytes)} requested with {held}"
