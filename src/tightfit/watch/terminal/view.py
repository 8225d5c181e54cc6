"""What a viewer has chosen, and what a key changes of it. Keys are those of nvitop, as far as there is something for them."""

import dataclasses
from collections.abc import Callable
from typing import Any

from tightfit.watch.machine.machine_state import MachineState, ProcessState

COLUMNS = ("GPU", "PID", "USER", "GPU-MEM", "NEXT HOUR", "TIME")
_SORT_KEYS = {"n": 0, "p": 1, "u": 2, "g": 3, "f": 4, "t": 5}
"""After `o`; a capital letter sorts the other way."""
_SIGNALS = {"I": "SIGINT", "T": "SIGTERM", "K": "SIGKILL"}
_SCROLL = 8
_PAGE = 10

HELP = (
    ("q", "quit"),
    ("h ?", "this help; any key closes it"),
    ("Up Down, Tab", "select a process (also Alt-k Alt-j)"),
    ("Home End", "the first, the last process"),
    ("PageUp PageDown, [ ]", "ten processes up, down"),
    ("Left Right, ^ $", "scroll the commands"),
    ("Esc", "select nothing"),
    ("Enter", "history of the selected process, or of its card"),
    ("a f c", "display: automatic, full (with history), compact"),
    (", . /", "sort by the column before, after; the other way"),
    ("on op ou", "sort by GPU, PID, user (oN oP oU: the other way)"),
    ("og of ot", "sort by memory, next hour, running time"),
    ("I T K", "interrupt, terminate, kill the selected process"),
    ("r F5", "refresh"),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The choices of one viewer. `selected` is a card's UUID and a PID; `asked` is the signal that waits for a yes."""

    mode: str = "auto"
    sort_column: int = 0
    is_reversed: bool = False
    selected: tuple[str, int] | None = None
    scroll: int = 0
    is_help: bool = False
    is_detail: bool = False
    prefix: str = ""
    asked: str = ""
    message: str = ""
    has_quit: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SignalRequest:
    """A signal that the viewer wants sent to a process."""

    signal: str
    process: ProcessState


def ordered(state: MachineState, view: View) -> list[ProcessState]:
    """All processes in the order of the view; those that are alike by memory, the largest first, so that rows do not dance."""
    indices = {card.reading.uuid: card.reading.index for card in state.cards}
    keys: tuple[Callable[[ProcessState], Any], ...] = (
        lambda each: indices.get(each.card, -1),
        lambda each: each.facts.pid,
        lambda each: each.facts.user,
        lambda each: -(each.used_bytes or 0),
        lambda each: -(each.outlook.upper_bytes if each.outlook else each.used_bytes or 0),
        lambda each: each.facts.started or 0.0,
    )
    alike = sorted(
        state.processes, key=lambda each: (indices.get(each.card, -1), -(each.used_bytes or 0), each.facts.pid)
    )
    return sorted(alike, key=keys[view.sort_column], reverse=view.is_reversed)


def selected(state: MachineState, view: View) -> ProcessState | None:
    """The selected process, if it is still there."""
    return next((each for each in state.processes if (each.card, each.facts.pid) == view.selected), None)


def pressed(view: View, key: str, state: MachineState) -> tuple[View, SignalRequest | None]:
    """The view after a key, and the signal that the key has confirmed."""
    view = dataclasses.replace(view, message="")
    if view.asked:
        return _answered(view, key, state)
    if view.is_help:
        return dataclasses.replace(view, is_help=False), None
    if view.prefix:
        return _sorted_by(dataclasses.replace(view, prefix=""), key), None
    if key in _SIGNALS:
        return _ask(view, _SIGNALS[key], state), None
    if key in _MOVES:
        return _moved(view, key, state), None
    return dataclasses.replace(view, **_CHANGES.get(key, lambda _: {})(view)), None


_MOVES: dict[str, Callable[[int, int], int]] = {
    "up": lambda at, last: at - 1 if at >= 0 else last,
    "down": lambda at, last: at + 1,
    "page up": lambda at, last: at - _PAGE,
    "page down": lambda at, last: max(at, 0) + _PAGE,
    "home": lambda at, last: 0,
    "end": lambda at, last: last,
}
_CHANGES: dict[str, Callable[[View], dict[str, Any]]] = {
    "q": lambda view: {"has_quit": True},
    "h": lambda view: {"is_help": True},
    "a": lambda view: {"mode": "auto"},
    "f": lambda view: {"mode": "full"},
    "c": lambda view: {"mode": "compact"},
    "o": lambda view: {"prefix": "o"},
    "left": lambda view: {"scroll": max(0, view.scroll - _SCROLL)},
    "right": lambda view: {"scroll": min(view.scroll + _SCROLL, 400)},
    "line start": lambda view: {"scroll": 0},
    "line end": lambda view: {"scroll": 400},
    "escape": lambda view: {"selected": None, "is_detail": False},
    "enter": lambda view: {"is_detail": not view.is_detail},
    ",": lambda view: {"sort_column": (view.sort_column - 1) % len(COLUMNS)},
    ".": lambda view: {"sort_column": (view.sort_column + 1) % len(COLUMNS)},
    "/": lambda view: {"is_reversed": not view.is_reversed},
}


def _moved(view: View, key: str, state: MachineState) -> View:
    rows = ordered(state, view)
    if not rows:
        return dataclasses.replace(view, selected=None)
    keys = [(each.card, each.facts.pid) for each in rows]
    at = keys.index(view.selected) if view.selected in keys else -1
    to = min(max(_MOVES[key](at, len(rows) - 1), 0), len(rows) - 1)
    return dataclasses.replace(view, selected=keys[to])


def _sorted_by(view: View, key: str) -> View:
    column = _SORT_KEYS.get(key.lower())
    return view if column is None else dataclasses.replace(view, sort_column=column, is_reversed=key.isupper())


def _ask(view: View, signal: str, state: MachineState) -> View:
    process = selected(state, view)
    if process is None:
        return dataclasses.replace(view, message="select a process first (Up, Down)")
    words = f"send {signal} to process {process.facts.pid}, {process.facts.command[:40]}? y or n"
    return dataclasses.replace(view, asked=signal, message=words)


def _answered(view: View, key: str, state: MachineState) -> tuple[View, SignalRequest | None]:
    asked, view = view.asked, dataclasses.replace(view, asked="")
    process = selected(state, view)
    if key != "y" or process is None:
        return dataclasses.replace(view, message="nothing was sent"), None
    return view, SignalRequest(signal=asked, process=process)
