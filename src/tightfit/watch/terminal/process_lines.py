"""Processes as lines: as many columns as the width allows, as many rows as there is room for, the selected one among them."""

from rich.text import Text

from tightfit.watch.machine.machine_state import MachineState, ProcessState
from tightfit.watch.terminal.view import COLUMNS, View, ordered
from tightfit.watch.terminal.words import age, bound, size

_WIDTHS = {"GPU": 4, "PID": 8, "USER": 8, "GPU-MEM": 8, "NEXT HOUR": 13, "TORCH": 13, "TIME": 6, "CONTAINER": 20}
_RIGHT = ("GPU", "PID", "GPU-MEM", "NEXT HOUR", "TORCH", "TIME")
_WANTED = ("GPU", "GPU-MEM", "PID", "NEXT HOUR", "USER", "TIME", "TORCH", "CONTAINER")
_MIN_COMMAND = 18


def process_lines(state: MachineState, now: float, view: View, width: int, room: int) -> list[Text]:
    """A heading and rows, at most `room` lines."""
    if room < 2 or not state.processes:
        return []
    rows = ordered(state, view)
    columns = _columns(state, width)
    at = next((i for i, each in enumerate(rows) if (each.card, each.facts.pid) == view.selected), 0)
    first = min(max(0, at - (room - 1) + 1), max(0, len(rows) - (room - 1)))
    lines = [_heading(columns, view, width)]
    for each in rows[first : first + room - 1]:
        is_selected = (each.card, each.facts.pid) == view.selected
        lines.append(_row(state, each, now, columns, view, width, is_selected=is_selected))
    return lines


def _columns(state: MachineState, width: int) -> list[str]:
    wanted = [name for name in _WANTED if _is_used(state, name)]
    chosen, left = [], width
    for name in wanted:
        # Half of the screen is kept for commands, as soon as what identifies a process is there.
        least = 0 if name in _WANTED[:3] else _MIN_COMMAND if name not in ("TORCH", "CONTAINER") else 45
        if left - _WIDTHS[name] - 1 >= least:
            chosen.append(name)
            left -= _WIDTHS[name] + 1
    return [name for name in _WIDTHS if name in chosen]


def _is_used(state: MachineState, name: str) -> bool:
    if name == "TORCH":
        return any(each.allocated_bytes is not None for each in state.processes)
    return name != "CONTAINER" or any(each.facts.container for each in state.processes)


def _heading(columns: list[str], view: View, width: int) -> Text:
    line = Text(style="bold reverse")
    for name in columns:
        mark = ("▼" if view.is_reversed else "▲") if COLUMNS[view.sort_column] == name else ""
        words = f"{name}{mark}"[: _WIDTHS[name]]
        line.append(f"{words:>{_WIDTHS[name]}} " if name in _RIGHT else f"{words:<{_WIDTHS[name]}} ")
    line.append("COMMAND")
    line.append(" " * max(0, width - line.cell_len))
    return line


def _row(
    state: MachineState,
    each: ProcessState,
    now: float,
    columns: list[str],
    view: View,
    width: int,
    *,
    is_selected: bool,
) -> Text:
    facts = each.facts
    index = next((str(card.reading.index) for card in state.cards if card.reading.uuid == each.card), "-")
    cells = {
        "GPU": index,
        "PID": str(facts.pid),
        "USER": facts.user,
        "GPU-MEM": size(each.used_bytes),
        "NEXT HOUR": bound(each.outlook),
        "TORCH": f"{size(each.allocated_bytes)}/{size(each.reserved_bytes)}",
        "TIME": age(each, now),
        "CONTAINER": facts.container or "-",
    }
    line = Text(style="reverse" if is_selected else "")
    for name in columns:
        cell = Text(cells[name])
        # In cells of the terminal and not in characters: names may be wide.
        cell.truncate(_WIDTHS[name], overflow="crop")
        cell.align("right" if name in _RIGHT else "left", _WIDTHS[name])
        line.append_text(cell).append(" ")
    line.append(facts.command[view.scroll :])
    line.append(" " * max(0, width - line.cell_len))
    return line
