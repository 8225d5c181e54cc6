"""Whether a rule holds at this moment, and for whom."""

from collections.abc import Iterator, Mapping

from tightfit.units import format_bytes
from tightfit.watch.alerts.alert_rules import Rule
from tightfit.watch.machine.machine_state import CardState, MachineState, Outlook, ProcessState

Bounds = Mapping[float, Mapping[str, Outlook]]
"""Forecasts of cards by horizon in seconds and UUID."""


def holding(rule: Rule, state: MachineState, bounds: Bounds) -> dict[str, str]:
    """The subjects for which a rule holds, with what is to be said of each."""
    return dict(_CONDITIONS[rule.kind](rule, state, bounds))


def _threshold(rule: Rule, state: MachineState, bounds: Bounds) -> Iterator[tuple[str, str]]:
    if rule.of == "card":
        for card in _cards(rule, state):
            reading = card.reading
            limit = _limit(rule, reading.total_bytes)
            if limit is not None and reading.used_bytes is not None and reading.used_bytes >= limit:
                whole = f" of {format_bytes(reading.total_bytes)}" if reading.total_bytes else ""
                yield f"GPU {reading.index}", f"{format_bytes(reading.used_bytes)}{whole} used"
        return
    totals = {card.reading.uuid: card.reading.total_bytes for card in state.cards}
    for process in _processes(rule, state):
        limit = _limit(rule, totals.get(process.card))
        if limit is not None and process.used_bytes is not None and process.used_bytes >= limit:
            yield _name(process, state), f"{format_bytes(process.used_bytes)} used"


def _forecast(rule: Rule, state: MachineState, bounds: Bounds) -> Iterator[tuple[str, str]]:
    found = bounds.get(rule.within_seconds, {})
    for card in _cards(rule, state):
        reading, outlook = card.reading, found.get(card.reading.uuid)
        limit = _limit(rule, reading.total_bytes)
        if outlook is None or limit is None or outlook.upper_bytes < limit or not reading.total_bytes:
            continue
        within = f"{100 * outlook.quantile:g} % within {format_bytes(outlook.upper_bytes)}"
        grows = f", it {outlook.note}" if outlook.growth_bytes_per_hour else ""
        yield (
            f"GPU {reading.index}",
            f"peak of the next {rule.within_seconds / 60:.0f} min: {within}, of {format_bytes(reading.total_bytes)}{grows}",
        )


def _growth(rule: Rule, state: MachineState, bounds: Bounds) -> Iterator[tuple[str, str]]:
    limit = rule.above_bytes or 0
    if rule.of == "card":
        for card in _cards(rule, state):
            if card.outlook is not None and 0 < limit <= card.outlook.growth_bytes_per_hour:
                yield f"GPU {card.reading.index}", card.outlook.note
        return
    for process in _processes(rule, state):
        if process.outlook is not None and 0 < limit <= process.outlook.growth_bytes_per_hour:
            yield _name(process, state), process.outlook.note


def _driver(rule: Rule, state: MachineState, bounds: Bounds) -> Iterator[tuple[str, str]]:
    if state.lost_since is not None:
        yield state.source, f"does not answer: {state.lost_reason}"


_CONDITIONS = {"threshold": _threshold, "forecast": _forecast, "growth": _growth, "driver": _driver}


def _cards(rule: Rule, state: MachineState) -> Iterator[CardState]:
    gpu = rule.filters.get("gpu")
    return (card for card in state.cards if gpu is None or card.reading.index == gpu)


def _processes(rule: Rule, state: MachineState) -> Iterator[ProcessState]:
    cards = {card.reading.uuid for card in _cards(rule, state)}
    texts = [(key, part) for key, part in rule.filters.items() if key != "gpu"]
    for process in state.processes:
        if process.card in cards and all(part in getattr(process.facts, key) for key, part in texts):
            yield process


def _limit(rule: Rule, total: int | None) -> float | None:
    if rule.above_share is not None:
        return rule.above_share * total if total else None
    return rule.above_bytes


def _name(process: ProcessState, state: MachineState) -> str:
    """What tells a process apart over its whole life: an episode is its own."""
    index = next((card.reading.index for card in state.cards if card.reading.uuid == process.card), "?")
    return f"process {process.facts.pid} ({process.facts.user}, GPU {index}): {process.facts.command[:80]}"
