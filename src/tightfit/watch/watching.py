"""This process's part in watching a machine: it is the agent, in a thread of its own, or a reader of the history that another process's agent writes."""

import dataclasses
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from tightfit.errors import WatchError
from tightfit.watch.agent.agent import Agent, AgentSettings
from tightfit.watch.alerts.alert_rules import AlertSettings
from tightfit.watch.background import Background
from tightfit.watch.clock import AbstractClock, SystemClock
from tightfit.watch.machine.machine_state import MachineState
from tightfit.watch.sources.abstract_source import AbstractSource
from tightfit.watch.store.folder import StoreFolder
from tightfit.watch.store.stored_state import stored_state

_RETRY_SECONDS = 5.0
_END_SECONDS = 10.0


class Watching:
    """The machine, as an agent of this process or of another one sees it. A reader becomes the agent when the other one has ended."""

    def __init__(
        self,
        folder: StoreFolder,
        open_source: Callable[[], AbstractSource],
        settings: AgentSettings,
        sinks: Sequence[Background[MachineState]] = (),
    ) -> None:
        """`sinks` are for the agent, if it is in this process."""
        self._sinks = sinks
        self._folder, self._open_source, self._settings = folder, open_source, settings
        self._clock: AbstractClock = SystemClock()
        self._agent: Agent | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._fault: Exception | None = None
        self._stored: MachineState | None = None
        self._next_try = 0.0
        self._trying = threading.Lock()

    @property
    def database(self) -> Path:
        """The file of the history."""
        return self._folder.database

    @property
    def is_agent(self) -> bool:
        """Whether the agent is in this process."""
        return self._agent is not None

    def start(self) -> None:
        """Becomes the agent, or finds the history of the one that there is.

        Raises:
            WatchError: there is no driver, or no history that can be written or read.
        """
        if not self._take_over():
            self._read()

    def state(self) -> MachineState | None:
        """The machine now; None before the first reading.

        Raises:
            WatchError: the history of another agent can no longer be read.
            Exception: what ended this process's agent.
        """
        if self._fault is not None:
            raise self._fault
        if self._agent is not None:
            return self._agent.state()
        # Of several threads that ask, one tries.
        if self._clock.monotonic() >= self._next_try and self._trying.acquire(blocking=False):
            try:
                if self._agent is not None or self._take_over():
                    return self._stored
            finally:
                self._trying.release()
        self._stored = self._read() or self._stored
        return self._stored

    def close(self) -> None:
        """Ends the agent, and gives the lock back."""
        self._stop.set()
        if self._thread is not None:
            # A driver may never answer: then the thread, and the lock, end with the process.
            self._thread.join(_END_SECONDS)
            if self._thread.is_alive():
                return
        self._folder.unlock()

    def _read(self) -> MachineState | None:
        """What another agent has written; None while it has not."""
        try:
            return stored_state_or_none(self.database)
        except WatchError:
            # That agent is about to make the file.
            if self._folder.is_locked() and not self.database.exists():
                return None
            raise

    def _take_over(self) -> bool:
        self._next_try = self._clock.monotonic() + _RETRY_SECONDS
        try:
            if not self._folder.lock():
                return False
        except WatchError:
            # Another user's history can be read all the same.
            if self.database.is_file():
                self._next_try = float("inf")
                return False
            raise
        try:
            self._agent = Agent(self._open_source(), self.database, self._clock, self._settings, self._sinks)
        except BaseException:
            self._folder.unlock()
            raise
        self._thread = threading.Thread(target=self._run, args=(self._agent,), name="tightfit watch agent", daemon=True)
        self._thread.start()
        return True

    def _run(self, agent: Agent) -> None:
        try:
            agent.run(self._stop)
        except Exception as error:  # noqa: BLE001 - raised again where somebody asks for the state
            self._fault = error
        finally:
            agent.close()


def stored_state_or_none(database: Path) -> MachineState | None:
    """What the history says; None where it has no reading yet, or is locked at the moment.

    Raises:
        WatchError: there is no history, or it cannot be read.
    """
    try:
        return stored_state(database)
    except (LookupError, sqlite3.Error):
        return None


def one_reading(source: AbstractSource, folder: Path, settings: AgentSettings) -> MachineState:
    """One reading of a source, with a history of its own in `folder`.

    Raises:
        WatchError: the driver does not answer.
    """
    quiet = dataclasses.replace(settings, alerts=AlertSettings(rules=()), listen_at=None)
    agent = Agent(source, folder / "history.sqlite", SystemClock(), quiet)
    try:
        agent.tick()
        state = agent.state()
    finally:
        agent.close()
    if state is None:
        raise WatchError("the driver does not answer")
    return state
