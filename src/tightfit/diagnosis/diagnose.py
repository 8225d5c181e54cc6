"""The diagnosis behind `tightfit doctor`: memory at the peak, allocation sites, fragmentation, growth from step to step, and suggestions.

One run is enough, whether tightfit predicted it or it was recorded on a GPU; a `DiagnosedRun` is either.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from tightfit.allocator.caching import CachingAllocator
from tightfit.allocator.pools import Block
from tightfit.diagnosis.allocation_sites import SiteUsage, bytes_by_category, largest_sites
from tightfit.diagnosis.diagnosed_run import DiagnosedRun, SettingTried
from tightfit.diagnosis.fragmentation import Fragmentation, fragmentation_of
from tightfit.diagnosis.growth import MIN_STEPS, Growth, growth_of
from tightfit.diagnosis.named_leaks import named_leaks
from tightfit.diagnosis.step_spans import StepSpan, steps_of
from tightfit.diagnosis.suggestions.from_history import suggestions_of
from tightfit.diagnosis.suggestions.from_loading import suggestions_on_loading
from tightfit.planner.suggestion import Suggestion, in_order
from tightfit.recordings.allocator_trace import settings_text
from tightfit.recordings.frames import AllocationSite
from tightfit.runtime.leaks.found_leaks import Leak
from tightfit.runtime.leaks.robust_growth import MIN_STEPS as MIN_STEPS_OF_A_SERIES
from tightfit.simulate.history import CATEGORIES, History
from tightfit.tape import Assumption

SCHEMA = 1
NUM_SITES = 12
# Keys that programs read already keep their first names.
_JSON_KEYS = {"allocation_sites": "holders", "suggestions": "remedies"}
NUM_PINS = 5
DEFAULT_SECONDS = 10.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A time step of a run: the event, its step, the seconds since the start (None where not known), and the allocation made then."""

    event: int
    step: str
    seconds: float | None
    where: str
    operator: str
    asked_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PinnedBy:
    """An allocation site whose blocks pin segments: free pieces beside them cannot be returned to the driver."""

    where: str
    category: str
    num_blocks: int
    live_bytes: int
    pinned_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordedOutOfMemory:
    """The first out-of-memory error of a recording: the request, allocated and reserved bytes then, the largest free block, and the GPU's free memory if known."""

    event: int
    where: str
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    largest_free_bytes: int
    gpu_free_bytes: int | None
    num_failures: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The diagnosis of one run. All bytes are sizes of blocks, as the allocator rounds them.

    `leaks` are the growing sites whose holder is known. `moment` is the allocated peak, which `at_peak` and `allocation_sites` describe. `fragmented_at` is the reserved peak (or the out-of-memory error, where
    there was one), which `fragmentation` describes. `start_reserved_bytes` was reserved before the first event.
    """

    label: str
    origin: str
    device: str
    capacity_bytes: int | None
    context_bytes: int | None
    communicator_bytes: int
    settings: str
    num_events: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    start_reserved_bytes: int
    moment: Moment
    at_peak: Mapping[str, int]
    allocation_sites: tuple[SiteUsage, ...]
    steps: tuple[StepSpan, ...]
    growth: tuple[Growth, ...]
    growth_note: str
    leaks: tuple[Leak, ...]
    fragmented_at: Moment
    fragmentation: Fragmentation
    pinned_by: tuple[PinnedBy, ...]
    oom: RecordedOutOfMemory | None
    settings_tried: tuple[SettingTried, ...]
    suggestions: tuple[Suggestion, ...]
    assumptions: tuple[Assumption, ...]

    def to_json(self) -> dict[str, Any]:
        """The object that `tightfit doctor --json` prints."""
        plain = dataclasses.asdict(self)
        # Single addresses mean nothing to a reader of the JSON; `pinned_by` has them grouped by allocation site.
        plain["fragmentation"].pop("pins")
        plain["fragmentation"]["free_bytes"] = self.fragmentation.free_bytes
        plain["leaks"] = [one.to_json() for one in self.leaks]
        plain["suggestions"] = [one.to_json() for one in self.suggestions]
        return {"schema": SCHEMA} | {_JSON_KEYS.get(name, name): value for name, value in plain.items()}


def diagnose(subject: DiagnosedRun, *, seconds: float = DEFAULT_SECONDS) -> Diagnosis:
    """Diagnoses one run; about `seconds` go into the search for better allocator settings.

    All figures are 0 for a run without allocations.
    """
    history, places = subject.history, subject.places
    peak, fragmented_at = history.peak_event, _max_reserved(subject)
    # The replay that built the history did not know yet which event to look at, so the run is replayed once more.
    every_step = steps_of(history)
    # Set-up and evaluations in between do not repeat, so growth is looked for among steps only.
    steps = tuple(step for step in every_step if step.kind == "step")
    look = _Look(fragmented_at, {step.end - 1 for step in steps} if len(steps) >= MIN_STEPS_OF_A_SERIES else ())
    subject.again(look)
    alive = history.alive_at(peak)
    settings = subject.try_settings(seconds)
    found = look.found
    return Diagnosis(
        label=history.label,
        origin=history.origin,
        device=history.device,
        capacity_bytes=history.capacity_bytes,
        context_bytes=history.context_bytes,
        communicator_bytes=history.communicator_bytes,
        settings=settings_text(history.settings),
        num_events=history.num_events,
        peak_allocated_bytes=int(history.allocated.max(initial=0)),
        peak_reserved_bytes=int(history.reserved.max(initial=0)),
        start_reserved_bytes=look.start_reserved_bytes,
        moment=_moment(history, places, peak),
        at_peak=bytes_by_category(history, alive),
        allocation_sites=largest_sites(history, places, alive)[:NUM_SITES],
        steps=every_step,
        growth=growth_of(history, places, steps),
        growth_note="" if len(steps) >= MIN_STEPS else f"needs {MIN_STEPS} steps; this run has {len(steps)}",
        leaks=named_leaks(history, places, steps, subject.holders, look.waiting_at),
        fragmented_at=_moment(history, places, fragmented_at),
        fragmentation=found,
        pinned_by=_pinned_by(history, places, fragmented_at, found),
        oom=_out_of_memory(subject, found),
        settings_tried=settings,
        suggestions=in_order(
            [
                *suggestions_of(history, places, subject.phases, subject.costs),
                *suggestions_on_loading(subject.pipeline),
                *_of_settings(settings),
            ]
        ),
        assumptions=history.assumptions,
    )


class _Look:
    """Takes the fragmentation at one event of a replay, the bytes reserved before the first event, and those that wait for other streams at `ends`."""

    def __init__(self, event: int, ends: Collection[int]) -> None:
        self._event = event
        self._ends = ends
        self.waiting_at: dict[int, int] = {}
        """By event of `ends`, bytes that are freed and not reserved for good: another stream may still use them."""
        self.start_reserved_bytes = 0
        self.found: Fragmentation

    def __call__(self, event: int, allocator: CachingAllocator, blocks: Mapping[int, Block]) -> None:
        if event < 0:
            self.start_reserved_bytes = allocator.reserved_bytes
        if event in self._ends:
            self.waiting_at[event] = fragmentation_of(allocator, blocks).waiting_bytes
        if event == self._event:
            self.found = fragmentation_of(allocator, blocks)


def _max_reserved(subject: DiagnosedRun) -> int:
    """The event of the first out-of-memory error, or else of the reserved peak; -1 where there is no event.

    Where the peak was reserved before the first event, it is the event at that level with the most allocated bytes.
    """
    if subject.failure is not None:
        return subject.failure.event
    reserved, allocated = subject.history.reserved, subject.history.allocated
    if not len(reserved):
        return -1
    # With a warm cache reserved bytes are flat for the whole recording, and the first of the equal events says nothing.
    first = int(reserved.argmax())
    return first if first else int(np.where(reserved == reserved[0], allocated, -1).argmax())


def _moment(history: History, places: tuple[AllocationSite, ...], event: int) -> Moment:
    blocks = history.blocks
    # Allocated bytes rise only with an allocation, so the event of a peak allocates a block.
    at = np.flatnonzero(blocks.allocated_at == event) if event >= 0 else []
    place = places[int(blocks.stack[at[0]])] if len(at) else None
    step = next((span.name for span in history.spans if span.begin <= event < span.end), "")
    return Moment(
        event=event,
        step=step,
        seconds=float(history.time_us[event]) / 1e6 if len(history.time_us) and event >= 0 else None,
        where="" if place is None else place.name,
        operator="" if place is None else place.operator,
        asked_bytes=int(blocks.num_bytes[at[0]]) if len(at) else 0,
    )


def _pinned_by(
    history: History, places: tuple[AllocationSite, ...], event: int, found: Fragmentation
) -> tuple[PinnedBy, ...]:
    """The allocation sites that pin most bytes at the event."""
    alive = np.flatnonzero(history.alive_at(event))
    # A pin is a block of the replayed allocator; its address leads to the block of the history, which knows its site.
    block_at = dict(zip(history.blocks.address[alive].tolist(), alive.tolist(), strict=True))
    groups: dict[tuple[str, str], list[int]] = {}
    for pin in found.pins:
        block = block_at.get(pin.address)
        # The neighbour may be a freed block that waits for another stream, which the history counts as freed.
        where = "" if block is None else places[int(history.blocks.stack[block])].name
        category = "unknown" if block is None else CATEGORIES[int(history.blocks.category[block])]
        group = groups.setdefault((where, category), [0, 0, 0])
        for at, value in enumerate((1, pin.live_bytes, pin.pinned_bytes)):
            group[at] += value
    largest = sorted(groups.items(), key=lambda item: -item[1][2])[:NUM_PINS]
    return tuple(
        PinnedBy(where=where, category=category, num_blocks=count, live_bytes=live, pinned_bytes=pinned)
        for (where, category), (count, live, pinned) in largest
        if pinned
    )


def _out_of_memory(subject: DiagnosedRun, found: Fragmentation) -> RecordedOutOfMemory | None:
    failure = subject.failure
    if failure is None:
        return None
    return RecordedOutOfMemory(
        event=failure.event,
        where=subject.places[failure.stack].name,
        requested_bytes=failure.requested_bytes,
        allocated_bytes=found.allocated_bytes,
        reserved_bytes=found.reserved_bytes,
        largest_free_bytes=found.largest_free_bytes,
        gpu_free_bytes=failure.gpu_free_bytes,
        num_failures=failure.num_failures,
    )


def _of_settings(settings: tuple[SettingTried, ...]) -> list[Suggestion]:
    return [
        Suggestion(
            what=f"PYTORCH_CUDA_ALLOC_CONF={one.settings}",
            saves="reserved",
            saves_bytes=one.saves_bytes,
            # A setting of the allocator changes no operator.
            adds_seconds=0.0,
            note="an allocator setting, set before the first CUDA allocation",
        )
        for one in settings
        if one.is_advised
    ]
