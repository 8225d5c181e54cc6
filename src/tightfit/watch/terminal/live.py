"""Runs the screen on a terminal: draws once a second and after each key, and sends the signals that the viewer has confirmed."""

import dataclasses
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

from tightfit.errors import WatchError
from tightfit.watch.machine.machine_state import MachineState
from tightfit.watch.sources.host_processes import facts_of_process
from tightfit.watch.store.stored_history import CardHistory, StoredHistory
from tightfit.watch.terminal.raw_terminal import RawTerminal, frame
from tightfit.watch.terminal.screen import ScreenContent, screen
from tightfit.watch.terminal.view import SignalRequest, View, pressed
from tightfit.watch.watching import Watching

_DRAW_SECONDS = 1.0
_HISTORY_SECONDS = 10.0
_CHART_SECONDS, _CHART_BINS, _CHART_LAYERS = 3600.0, 180, 256
_MAX_READ = 4
"""Histories that are read for one drawing, so that many cards do not hold it up."""
Advise = Callable[[MachineState], Sequence[str]]


def run_screen(watching: Watching, advise: Advise) -> None:
    """Shows the machine until the viewer quits or the process is told to end.

    Raises:
        WatchError: the machine can no longer be watched.
    """
    # Colours and NO_COLOR are rich's; the size is asked of the terminal each time.
    console, histories, view = Console(), _Histories(watching), View()
    is_ascii = not (sys.stdout.encoding or "").lower().startswith("utf")
    with RawTerminal() as terminal:
        while not view.has_quit and not terminal.is_ended:
            state = watching.state()
            width, height = terminal.size()
            if state is None:
                terminal.write(frame(iter([("waiting for the first reading (q quits)", False)])))
            else:
                histories.refresh(state, view)
                shown = ScreenContent(state=state, histories=histories.found, advice=advise(state), now=time.time())
                lines = screen(shown, view, width, height, is_ascii=is_ascii)
                terminal.write(frame((_styled(console, line), line.cell_len >= width) for line in lines))
            for key in terminal.keys(_DRAW_SECONDS):
                view = _after(view, key, state)


def _after(view: View, key: str, state: MachineState | None) -> View:
    if state is None:
        return dataclasses.replace(view, has_quit=key == "q")
    view, request = pressed(view, key, state)
    return view if request is None else dataclasses.replace(view, message=_send(request, state))


def _styled(console: Console, line: Text) -> str:
    with console.capture() as captured:
        console.print(line, end="", soft_wrap=True, highlight=False)
    return captured.get()


def _send(request: SignalRequest, state: MachineState) -> str:
    """Sends the signal, to the process that was selected and to no other that has its PID by now; says what came of it."""
    facts = request.process.facts
    if state.source == "simulated":
        return "simulated processes take no signals"
    if facts.identity == "?" or facts_of_process(facts.pid).identity != facts.identity:
        return f"process {facts.pid} is not to be found here"
    try:
        os.kill(facts.pid, signal.Signals[request.signal])
    except OSError as error:
        return f"{request.signal} to process {facts.pid}: {error.strerror}"
    return f"{request.signal} was sent to process {facts.pid}"


class _Histories:
    """The last hour of each card, read again now and then; the card in view first."""

    def __init__(self, watching: Watching) -> None:
        self.found: dict[str, CardHistory] = {}
        self._watching = watching
        self._read_at: dict[str, float] = {}

    def refresh(self, state: MachineState, view: View) -> None:
        """Reads what is due. What cannot be read now stays what it was."""
        now = time.monotonic()
        due = [
            card.reading.uuid
            for card in state.cards
            if now - self._read_at.get(card.reading.uuid, -_HISTORY_SECONDS) >= _HISTORY_SECONDS
        ]
        if not due:
            return
        due.sort(key=lambda uuid: (view.selected is None or uuid != view.selected[0], self._read_at.get(uuid, 0.0)))
        try:
            history = StoredHistory(self._watching.database)
        except WatchError:
            return
        try:
            for uuid in due[:_MAX_READ]:
                self._read_at[uuid] = now
                self.found[uuid] = history.of_card(
                    uuid, seconds=_CHART_SECONDS, bins=_CHART_BINS, num_layers=_CHART_LAYERS
                )
        except (sqlite3.Error, LookupError):
            return
        finally:
            history.close()
