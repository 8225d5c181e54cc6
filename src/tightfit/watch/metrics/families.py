"""Which metrics there are: OpenTelemetry's names for hardware, and our own for processes, forecasts and alerts; all in base units.

Names and attributes of `hw_*` are those of the semantic conventions for hardware and for GPUs (`hw.gpu.memory.usage` with the unit `By`, status: development), in the form that
OpenTelemetry's rules for Prometheus give them: `_` for dots, the unit as a suffix (bytes, watts, celsius; ratio for gauges of unit 1).
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping

from tightfit.watch.machine.machine_state import MachineState, Outlook, ProcessState, firing
from tightfit.watch.machine.readings import CardReading

MAX_PROCESSES = 500
"""Of more processes the largest are exported: each is a series in the server that scrapes."""

Labels = Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One metric, a gauge: its unit is the end of its name, empty for none; samples are labels and values."""

    name: str
    unit: str
    help: str
    samples: tuple[tuple[Labels, float], ...]


def families(state: MachineState) -> Iterator[Family]:
    """All metrics of a machine that have a sample."""
    found = (*_of_cards(state), *_of_processes(state), *_of_the_agent(state))
    return (family for family in found if family.samples)


def _of_cards(state: MachineState) -> Iterator[Family]:
    readings = [card.reading for card in state.cards]
    labels = {card.uuid: _card_labels(card) for card in readings}

    def each(name: str, unit: str, words: str, values: Mapping[str, float | None], **more: str) -> Family:
        rows = tuple(({**labels[uuid], **more}, value) for uuid, value in values.items() if value is not None)
        return Family(name=name, unit=unit, help=words, samples=rows)

    yield each(
        "hw_gpu_memory_limit_bytes", "bytes", "Size of the GPU memory.", {c.uuid: c.total_bytes for c in readings}
    )
    yield each("hw_gpu_memory_usage_bytes", "bytes", "GPU memory used.", {c.uuid: c.used_bytes for c in readings})
    yield each(
        "hw_gpu_memory_utilization_ratio",
        "ratio",
        "Fraction of GPU memory used.",
        {c.uuid: c.used_bytes / c.total_bytes for c in readings if c.used_bytes is not None and c.total_bytes},
    )
    yield each(
        "hw_gpu_utilization_ratio",
        "ratio",
        "Fraction of time spent in a specific task.",
        {c.uuid: c.utilization for c in readings},
        hw_gpu_task="general",
    )
    yield each("hw_power_watts", "watts", "Power drawn by the component.", {c.uuid: c.power_watts for c in readings})
    yield each(
        "hw_temperature_celsius",
        "celsius",
        "Temperature of the component.",
        {c.uuid: c.temperature_celsius for c in readings},
    )
    is_lost = state.lost_since is not None
    rows = tuple(
        ({**labels[card.uuid], "hw_state": name}, float(is_lost == (name == "failed")))
        for card in readings
        for name in ("ok", "failed")
    )
    yield Family(name="hw_status", unit="", help="1 for the state that the component is in, else 0.", samples=rows)
    yield Family(
        name="tightfit_forecast_memory_bytes",
        unit="bytes",
        help="Peak memory of the GPU over the next horizon: within this with the probability of the label probability.",
        samples=tuple(row for card in state.cards for row in _forecasts({"hw_id": card.reading.uuid}, card.outlook)),
    )


def _of_processes(state: MachineState) -> Iterator[Family]:
    largest = sorted(state.processes, key=lambda each: -(each.used_bytes or 0))[:MAX_PROCESSES]
    labels = [_process_labels(each) for each in largest]
    for name, words, values in (
        ("tightfit_process_memory_usage_bytes", "GPU memory that a process uses.", [e.used_bytes for e in largest]),
        (
            "tightfit_process_torch_allocated_bytes",
            "Memory of live tensors, by torch's allocator, of a process that publishes it.",
            [e.allocated_bytes for e in largest],
        ),
        (
            "tightfit_process_torch_reserved_bytes",
            "Memory that torch's allocator has from the driver, of a process that publishes it.",
            [e.reserved_bytes for e in largest],
        ),
    ):
        rows = tuple((row, float(value)) for row, value in zip(labels, values, strict=True) if value is not None)
        yield Family(name=name, unit="bytes", help=words, samples=rows)
    yield Family(
        name="tightfit_process_forecast_memory_bytes",
        unit="bytes",
        help="Peak memory of a process over the next horizon: within this with the probability of the label probability.",
        samples=tuple(
            row
            for process in largest
            for row in _forecasts({"hw_id": process.card, "process_pid": str(process.facts.pid)}, process.outlook)
        ),
    )


def _of_the_agent(state: MachineState) -> Iterator[Family]:
    yield Family(
        name="tightfit_watch_last_reading_timestamp_seconds",
        unit="seconds",
        help="When the driver was last read, in Unix seconds.",
        samples=(({}, state.time),),
    )
    yield Family(
        name="tightfit_watch_driver_up",
        unit="",
        help="1 if the driver answers.",
        samples=(({"source": state.source}, float(state.lost_since is None)),),
    )
    yield Family(
        name="tightfit_watch_processes",
        unit="",
        help="Processes on all GPUs.",
        samples=(({}, float(len(state.processes))),),
    )
    counts: dict[tuple[str, str], int] = {}
    for episode in firing(state.episodes):
        counts[episode.rule, episode.subject] = 1
    yield Family(
        name="tightfit_watch_alert_firing",
        unit="",
        help="1 for each alert that has not ended.",
        samples=tuple(({"rule": rule, "subject": subject}, 1.0) for rule, subject in counts),
    )


def _card_labels(card: CardReading) -> Labels:
    return {
        "hw_id": card.uuid,
        "hw_name": f"GPU {card.index}",
        "hw_type": "gpu",
        "hw_model": card.name,
        "hw_vendor": card.vendor,
        "hw_driver_version": card.driver,
    }


def _process_labels(process: ProcessState) -> Labels:
    facts = process.facts
    return {
        "hw_id": process.card,
        "process_pid": str(facts.pid),
        "process_owner": facts.user,
        "process_command_line": facts.command,
        "container": facts.container,
    }


def _forecasts(labels: Labels, outlook: Outlook | None) -> Iterator[tuple[Labels, float]]:
    if outlook is not None:
        horizon = {**labels, "horizon_seconds": f"{outlook.horizon_seconds:.0f}"}
        yield {**horizon, "probability": "0.5"}, float(outlook.median_bytes)
        if not math.isclose(outlook.quantile, 0.5):
            yield {**horizon, "probability": f"{outlook.quantile:g}"}, float(outlook.upper_bytes)
