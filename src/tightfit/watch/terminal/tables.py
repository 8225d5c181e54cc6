"""Cards and processes as plain tables, for `--once` and for whatever is no terminal."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tightfit.watch.machine.machine_state import MachineState, firing
from tightfit.watch.terminal.words import age, bound, memory, percent, share, size, warnings


def tables(state: MachineState, now: float) -> RenderableType:
    """All cards, all processes, the alerts that have not ended, and what is wrong with the watching."""
    parts: list[RenderableType] = [_cards(state)]
    if state.processes:
        parts += [Text(""), _processes(state, now)]
    alerts = [f"alert: {each.rule}: {each.subject}: {each.message}" for each in firing(state.episodes)]
    parts += [Text(line) for line in (*alerts, *warnings(state, now))]
    return Group(*parts)


def _cards(state: MachineState) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("GPU", justify="right")
    table.add_column("name")
    for heading in ("memory", "used", "busy", "power", "temp.", _horizon(state)):
        table.add_column(heading, justify="right", no_wrap=True)
    for card in state.cards:
        reading = card.reading
        watts, celsius = reading.power_watts, reading.temperature_celsius
        table.add_row(
            str(reading.index),
            Text(reading.name, no_wrap=True, overflow="ellipsis"),
            memory(reading),
            percent(share(reading)),
            percent(reading.utilization),
            "-" if watts is None else f"{watts:.0f} W",
            "-" if celsius is None else f"{celsius:.0f} °C",
            bound(card.outlook),
        )
    return table


def _processes(state: MachineState, now: float) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("GPU", "PID"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("user", no_wrap=True)
    for heading in ("memory", _horizon(state), "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    # rich takes room from columns that may wrap first, and from all where none may: figures are not to be cut for a command.
    table.add_column("container")
    table.add_column("command")
    for card in state.cards:
        for each in state.processes_of(card.reading.uuid):
            facts = each.facts
            # Texts and no markup: a process may be called "[red]".
            table.add_row(
                str(card.reading.index),
                str(facts.pid),
                Text(facts.user),
                size(each.used_bytes),
                bound(each.outlook),
                age(each, now),
                Text(facts.container or "-", no_wrap=True, overflow="ellipsis"),
                Text(facts.command, no_wrap=True, overflow="ellipsis"),
            )
    return table


def _horizon(state: MachineState) -> str:
    made = next((card.outlook for card in state.cards if card.outlook is not None), None)
    return "next hour" if made is None or made.horizon_seconds == 3600 else f"next {made.horizon_seconds / 60:.0f} min"
