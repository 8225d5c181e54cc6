"""A run to diagnose or compare: its history, with what only its origin (a tape or a recording) knows."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tightfit.allocator.settings import AllocatorSettings
from tightfit.cost.roofline import operator_seconds
from tightfit.cost.steps import step_operators
from tightfit.devices.calibration import Calibration
from tightfit.devices.device import Device
from tightfit.diagnosis.histories import device_of, history_of_recording, history_of_tape
from tightfit.diagnosis.suggestions.from_history import Costs
from tightfit.recordings.allocator_trace import settings_text
from tightfit.recordings.categories import Lives, phases_of
from tightfit.recordings.frames import AllocationSite, place_of
from tightfit.recordings.read import Action, Recording
from tightfit.runtime.leaks.found_leaks import LeakHolder
from tightfit.simulate.communicators import beside, communicators_of
from tightfit.simulate.history import History
from tightfit.simulate.input_pipeline import InputPipeline, input_pipeline
from tightfit.simulate.peak import as_usable
from tightfit.simulate.step_work import priced
from tightfit.simulate.timeline_bytes import Watch, timeline_on
from tightfit.simulate.workspaces import with_workspaces_of
from tightfit.tape import Column, Phase, Tape
from tightfit.tape.element_bytes import REAL_BYTES
from tightfit.tuning.search_settings import tune
from tightfit.tuning.settings_search import MIN_GAIN
from tightfit.units import MIB

# One of each kind that docs/tuning.md found to help; a predicted run has no recording to search with more.
_SETTINGS = (
    "expandable_segments:True",
    "large_segment_size_mb:64",
    "max_split_size_mb:64",
    "roundup_power2_divisions:4",
)
# Types of states that are quantised already, or that no quantised state stands for.
_OF_STATES = dict.fromkeys(("uint8", "int8", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128"), 1)
# Expandable segments, the first of the list, cost no driver call in a steady loop and have no parameter to choose.
_NEARLY = 0.8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The first recorded out-of-memory error: its event, the rounded request, its stack, the GPU's free memory if known, and how many there are."""

    event: int
    requested_bytes: int
    stack: int
    gpu_free_bytes: int | None
    num_failures: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SettingTried:
    """Allocator settings, the reserved peak with them, and how much lower it is; `is_advised` marks the recommended one."""

    settings: str
    peak_reserved_bytes: int
    saves_bytes: int
    is_advised: bool
    note: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosedRun:
    """One run. `phases` has the `Phase` of each block, `places` the allocation site of each stack, `holders` what keeps a block, as far as it was traced,
    `pipeline` what feeds the steps.

    `again` replays the run for a watch, and `try_settings(seconds)` searches settings that reserve less, best first, in about that time.
    """

    history: History
    places: tuple[AllocationSite, ...]
    phases: Column
    costs: Costs | None
    holders: Mapping[int, LeakHolder]
    failure: Failure | None
    pipeline: InputPipeline | None = None
    again: Callable[[Watch], Any]
    try_settings: Callable[[float], tuple[SettingTried, ...]]


def subject_of_tape(
    tape: Tape,
    device: Device,
    settings: AllocatorSettings | None = None,
    calibration: Calibration | None = None,
    *,
    holders: Mapping[int, LeakHolder] | None = None,
) -> DiagnosedRun:
    """The run of a tape. `holders` has what keeps its storages, by their numbers.

    Raises:
        UsageError: the calibration was made on another GPU.
    """
    settings = settings or AllocatorSettings()
    history = history_of_tape(tape, device, settings, calibration)
    storage = tape.events.storage[history.blocks.allocated_at]
    operator = tape.storages.operator[storage]
    seconds = np.append(operator_seconds(tape, device, calibration), 0.0)
    phases = np.append(tape.operators.phase, Phase.OTHER)[operator].astype(np.int64)
    bytes_of_name = np.array([(REAL_BYTES | _OF_STATES).get(name, 0) for name in tape.strings])
    each_bytes = np.append(bytes_of_name[tape.operators.dtype], 0)[operator]

    # A tape is replayed once per setting, in well under a second, so no time limit is needed.
    def try_settings(_: float) -> tuple[SettingTried, ...]:
        card = device if calibration is None else calibration.applied_to(device)
        prepared = with_workspaces_of(card, tape, calibration)
        card = beside(card, communicators_of(tape, card))
        tried = []
        for text in _SETTINGS:
            settings = AllocatorSettings.parse(text)
            usable = as_usable(card, prepared, settings, None)
            peak_bytes = int(timeline_on(usable, prepared, settings).reserved.max(initial=0))
            saves_bytes = int(history.reserved.max(initial=0)) - peak_bytes
            tried.append((saves_bytes, text, peak_bytes))
        advised = _advised({text: saves_bytes for saves_bytes, text, _ in tried}, int(history.reserved.max(initial=0)))
        return _better(
            [
                SettingTried(
                    settings=text,
                    peak_reserved_bytes=peak_bytes,
                    saves_bytes=saves_bytes,
                    is_advised=text == advised,
                    note="",
                )
                for saves_bytes, text, peak_bytes in tried
            ]
        )

    return DiagnosedRun(
        history=history,
        places=tuple(place_of(stack) for stack in history.stacks),
        phases=phases,
        costs=Costs(
            block_seconds=seconds[operator],
            element_bytes=each_bytes,
            optimizers=tape.optimizers,
            forward_seconds=_forward_seconds(tape, seconds),
        ),
        holders={
            block: found for block, number in enumerate(storage.tolist()) if (found := (holders or {}).get(number))
        },
        failure=None,
        pipeline=input_pipeline(priced(tape, device, calibration), device, calibration),
        again=lambda watch: history_of_tape(tape, device, settings, calibration, watch=watch),
        try_settings=try_settings,
    )


def subject_of_recording(recording: Recording, device_index: int | None = None) -> DiagnosedRun:
    """The run of a recording.

    Raises:
        UsageError: the recording does not have that device.
        RecordingError: its marks cannot be read.
    """
    chosen = device_of(recording, device_index)
    history = history_of_recording(recording, chosen.device)
    places = tuple(place_of(stack) for stack in history.stacks)
    blocks = history.blocks
    lives = Lives(
        allocated_at=blocks.allocated_at,
        freed_at=blocks.freed_at,
        num_bytes=blocks.num_bytes,
        stack=blocks.stack,
        num_events=history.num_events,
    )
    # The first error: what follows it, if the program caught it, is another story.
    failed = np.flatnonzero(chosen.action == Action.OOM)

    def try_settings(seconds: float) -> tuple[SettingTried, ...]:
        if not chosen.num_events:
            return ()
        tuning = tune(recording, device=chosen.device, seconds=seconds)
        # Trials start from an empty cache, so they are compared with a trial and not with the recorded peak.
        now_bytes = (tuning.as_recorded or tuning.default).peak_reserved_bytes
        recommended = None if tuning.recommended is None else tuning.recommended.settings
        return _better(
            [
                SettingTried(
                    settings=row.settings,
                    peak_reserved_bytes=row.peak_reserved_bytes,
                    saves_bytes=now_bytes - row.peak_reserved_bytes,
                    is_advised=row.settings == recommended,
                    note=", ".join(filter(None, (*row.needs, row.note))),
                )
                for row in tuning.rows
                # A replay that was stopped at its bound has no exact peak to compare.
                if row.fits and not row.is_at_least and row.settings != settings_text(recording.settings)
            ]
        )

    return DiagnosedRun(
        history=history,
        places=places,
        phases=phases_of(places, lives),
        costs=None,
        holders={},
        failure=None
        if not len(failed)
        else Failure(
            event=int(failed[0]),
            requested_bytes=int(chosen.num_bytes[failed[0]]),
            stack=int(chosen.stack[failed[0]]),
            gpu_free_bytes=chosen.free_bytes_at_oom.get(int(failed[0])),
            num_failures=len(failed),
        ),
        again=lambda watch: history_of_recording(recording, chosen.device, watch=watch),
        try_settings=try_settings,
    )


def _advised(saves_bytes: dict[str, int], peak_bytes: int) -> str | None:
    """The recommended setting: the simplest where it is nearly as good as the best; None where the best gains little."""
    best = max(saves_bytes, key=lambda text: saves_bytes[text])
    if saves_bytes[best] < max(MIB, MIN_GAIN * peak_bytes):
        return None
    return _SETTINGS[0] if saves_bytes[_SETTINGS[0]] >= _NEARLY * saves_bytes[best] else best


def _better(tried: list[SettingTried]) -> tuple[SettingTried, ...]:
    return tuple(sorted((one for one in tried if one.saves_bytes >= MIB), key=lambda one: -one.saves_bytes))


def _forward_seconds(tape: Tape, seconds: Column) -> dict[str, float]:
    """Seconds of the last step's forward pass, by module."""
    steps = step_operators(tape)
    if not steps:
        return {}
    # The last step, which is the most like all later ones.
    begin, end = steps[-1]
    found: dict[str, float] = {}
    for operator in range(begin, end):
        if tape.operators.phase[operator] == Phase.FORWARD:
            module = tape.strings[tape.operators.module[operator]]
            found[module] = found.get(module, 0.0) + float(seconds[operator])
    return found
