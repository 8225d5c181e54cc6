"""The summary of a history that all reports share: peaks, categories and allocation sites, steps, GPUs, and assumptions.

`Summary.to_json` is what `tightfit report --format json` prints; the HTML page holds the same object and the data of its charts.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tightfit.allocator.settings import AllocatorSettings
from tightfit.devices.device import Device
from tightfit.reports.blocks_by_site import line_and_function, module_name, places, stack_of
from tightfit.reports.downsampled_timeline import category_timelines
from tightfit.simulate.estimate import Estimate
from tightfit.simulate.history import CATEGORIES, UNKNOWN, History
from tightfit.simulate.step_tracks import StepTracks
from tightfit.tape import Assumption, Column

SCHEMA = 1
NUM_PLACES = 50


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CardFit:
    """The device peak of the run on one GPU, in bytes of the whole process; `seconds_per_step` is None where it is not known."""

    device: str
    capacity_bytes: int
    device_bytes: int
    device_low_bytes: int
    device_high_bytes: int
    seconds_per_step: float | None

    @property
    def fits(self) -> bool:
        """Whether the likely peak is within the capacity."""
        return self.device_bytes <= self.capacity_bytes


def fit_of_estimate(estimate: Estimate) -> CardFit:
    """The fit on the GPU of an estimate."""
    return CardFit(
        device=estimate.device,
        capacity_bytes=estimate.capacity_bytes,
        device_bytes=estimate.peak.device_bytes,
        device_low_bytes=estimate.peak.device_low_bytes,
        device_high_bytes=estimate.peak.device_high_bytes,
        # 0 stands for a run without a complete step.
        seconds_per_step=estimate.seconds_per_step or None,
    )


def fit_of_recording(history: History, card: Device) -> CardFit:
    """The fit of a recorded run on `card`: its reserved peak and the context of that GPU, if the kernels allocated the same there.

    On the GPU that it was recorded on, the context is the recorded one, where there is one.
    """
    reserved = int(history.reserved.max(initial=0))
    context = card.context
    if card.name == history.device and history.context_bytes is not None:
        known = history.context_bytes
        # A reading has no range.
        context = dataclasses.replace(context, num_bytes=known, low_bytes=known, high_bytes=known)
    return CardFit(
        device=card.name,
        capacity_bytes=card.capacity_bytes,
        device_bytes=reserved + context.num_bytes,
        device_low_bytes=reserved + context.low_bytes,
        device_high_bytes=reserved + context.high_bytes,
        seconds_per_step=None,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpanSummary:
    """A step, the set-up before it, or something outside of steps; the pieces of an interrupted one are merged."""

    name: str
    kind: str
    begin: int
    end: int
    peak_event: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    end_allocated_bytes: int


def span_summaries(history: History) -> tuple[SpanSummary, ...]:
    """One summary per name of a span, in the order of their first events, without empty spans."""
    pieces: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for span in history.spans:
        begin, end = max(0, span.begin), min(span.end, history.num_events)
        if begin < end:
            pieces.setdefault((span.name, span.kind), []).append((begin, end))
    return tuple(_span_summary(history, name, kind, parts) for (name, kind), parts in pieces.items())


def _span_summary(history: History, name: str, kind: str, parts: list[tuple[int, int]]) -> SpanSummary:
    peaks = [begin + int(history.allocated[begin:end].argmax()) for begin, end in parts]
    peak = max(peaks, key=lambda event: history.allocated[event])
    return SpanSummary(
        name=name,
        kind=kind,
        begin=parts[0][0],
        end=parts[-1][1],
        peak_event=peak,
        peak_allocated_bytes=int(history.allocated[peak]),
        peak_reserved_bytes=max(int(history.reserved[begin:end].max()) for begin, end in parts),
        end_allocated_bytes=int(history.allocated[parts[-1][1] - 1]),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CriticalSeconds:
    """How long a step waits for work of one kind on one resource."""

    work: str
    resource: str
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """A predicted step: its seconds, how long each resource is idle in it, and its critical path by kind of work, which adds up to `seconds`."""

    seconds: float
    idle_seconds: Mapping[str, float]
    critical_path: tuple[CriticalSeconds, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of a report. `at_peak` has the bytes of each category then, and adds up with the cache to `peak_reserved_bytes`.

    `not_seen` says what of the program the run does not show. `step` are the seconds of the last step, where they were predicted.
    """

    label: str
    origin: str
    device: str
    capacity_bytes: int | None
    context_bytes: int | None
    communicator_bytes: int
    num_events: int
    peak_event: int
    peak_time_us: int | None
    peak_span: str
    peak_line: str
    peak_function: str
    peak_module: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    reserved_at_peak_bytes: int
    requested_at_peak_bytes: int
    at_peak: Mapping[str, int]
    spans: tuple[SpanSummary, ...]
    cards: tuple[CardFit, ...]
    assumptions: tuple[Assumption, ...]
    settings: str
    versions: Mapping[str, str]
    places: tuple[Mapping[str, Any], ...]
    not_seen: str = ""
    step: StepSeconds | None = None

    def to_json(self) -> dict[str, Any]:
        """The object that `tightfit report --format json` prints."""
        cards = [dataclasses.asdict(card) | {"fits": card.fits} for card in self.cards]
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            "schema": SCHEMA,
            **plain,
            "at_peak": dict(self.at_peak),
            "spans": [dataclasses.asdict(span) for span in self.spans],
            "cards": cards,
            "assumptions": [dataclasses.asdict(assumption) for assumption in self.assumptions],
            "versions": dict(self.versions),
            "places": [dict(place) for place in self.places],
            "step": None if self.step is None else dataclasses.asdict(self.step),
        }


def summarize(
    history: History, *, cards: Sequence[CardFit] = (), versions: Mapping[str, str] | None = None, not_seen: str = ""
) -> Summary:
    """The summary of `history`."""
    peak, blocks = history.peak_event, history.blocks
    alive = history.alive_at(peak)
    at_peak = _at_peak(history, alive)
    allocated = sum(at_peak.values())
    # A history without events has blocks of the start only, which are reserved too.
    reserved = int(history.reserved.max(initial=allocated))
    allocated_at = np.flatnonzero(blocks.allocated_at == peak) if peak >= 0 else []
    line = function = module = ""
    if len(allocated_at):
        line, function = line_and_function(stack_of(history, int(blocks.stack[allocated_at[0]])))
        module = module_name(history, int(allocated_at[0]))
    return Summary(
        label=history.label,
        origin=history.origin,
        device=history.device,
        capacity_bytes=history.capacity_bytes,
        context_bytes=history.context_bytes,
        communicator_bytes=history.communicator_bytes,
        num_events=history.num_events,
        peak_event=peak,
        # Relative to the first event, as histories of recordings and of tapes begin at different times.
        peak_time_us=int(history.time_us[peak] - history.time_us[0]) if peak >= 0 and len(history.time_us) else None,
        peak_span=next((span.name for span in history.spans if span.begin <= peak < span.end), ""),
        peak_line=line,
        peak_function=function,
        peak_module=module,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        reserved_at_peak_bytes=int(history.reserved[peak]) if peak >= 0 else reserved,
        requested_at_peak_bytes=int(blocks.num_bytes[alive].sum()),
        at_peak={**at_peak, "cache": reserved - allocated},
        spans=span_summaries(history),
        cards=tuple(cards),
        assumptions=history.assumptions,
        settings=settings_words(history.settings),
        versions=versions or {},
        places=tuple(_places(history)),
        not_seen=not_seen,
        step=None if history.step_tracks is None else _step_seconds(history.step_tracks),
    )


def _at_peak(history: History, alive: Column) -> dict[str, int]:
    """The bytes of each category at the peak; bytes that no block explains are "unknown"."""
    if history.peak_event < 0:
        held = np.bincount(history.blocks.category[alive], history.blocks.block_bytes[alive], len(CATEGORIES))
        return dict(zip(CATEGORIES, held.astype(np.int64).tolist(), strict=True))
    timeline = [int(level[0]) for level in category_timelines(history, np.array([history.peak_event]))]
    timeline[UNKNOWN] += int(history.allocated[history.peak_event]) - sum(timeline)
    return dict(zip(CATEGORIES, timeline, strict=True))


def _places(history: History) -> list[dict[str, Any]]:
    rows = []
    for place in places(history, NUM_PLACES):
        line, function = line_and_function(stack_of(history, place.stack))
        figures = {name: value for name, value in dataclasses.asdict(place).items() if name != "stack"}
        rows.append({**figures, "category": CATEGORIES[place.category], "line": line, "function": function})
    return rows


def settings_words(settings: AllocatorSettings) -> str:
    """The settings that differ from torch's defaults; empty if none does."""
    defaults = AllocatorSettings()
    changed = {
        field.name: getattr(settings, field.name)
        for field in dataclasses.fields(settings)
        if getattr(settings, field.name) != getattr(defaults, field.name)
    }
    return ", ".join(f"{name} {value}" for name, value in changed.items())


def _step_seconds(tracks: StepTracks) -> StepSeconds:
    return StepSeconds(
        seconds=tracks.seconds,
        idle_seconds={track.resource: track.idle_seconds for track in tracks.tracks},
        critical_path=tuple(
            CriticalSeconds(work=work, resource=resource, seconds=seconds)
            for (work, resource), seconds in tracks.critical_seconds.items()
        ),
    )
