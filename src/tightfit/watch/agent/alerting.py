"""The alerts of an agent: looks at the rules after each reading, keeps forecasts for the horizons that they name, and tells what begins and ends."""

import contextlib
import dataclasses
import sqlite3
from collections.abc import Mapping
from pathlib import Path

from tightfit.errors import WatchError
from tightfit.watch.alerts.alert_rules import AlertSettings
from tightfit.watch.alerts.conditions import Bounds
from tightfit.watch.alerts.episodes import Episodes, Notice
from tightfit.watch.alerts.notify import open_channels
from tightfit.watch.machine.machine_state import Episode, MachineState, Outlook
from tightfit.watch.outlook.planner import OutlookPlanner, OutlookSettings
from tightfit.watch.store.stored_history import StoredHistory


class Alerting:
    """Rules, their episodes and where they are told. `outlooks` are the settings of the agent's own forecasts, which count for rules with the same horizon."""

    def __init__(self, settings: AlertSettings, database: Path, outlooks: OutlookSettings) -> None:
        self._episodes = Episodes(settings.rules, _open_episodes(database))
        self._channels = open_channels(settings)
        self._needs_processes = any(rule.of == "process" for rule in settings.rules)
        self._usual = outlooks.horizon_seconds
        horizons = {rule.within_seconds for rule in settings.rules if rule.kind == "forecast"} - {self._usual}
        # All of them together may cost what the agent's own forecasts may.
        share = outlooks.share / max(1, len(horizons))
        self._planners = {
            each: OutlookPlanner(database, dataclasses.replace(outlooks, horizon_seconds=each, share=share))
            for each in horizons
        }

    @property
    def needs_processes(self) -> bool:
        """Whether a rule is about processes."""
        return self._needs_processes

    @property
    def episodes(self) -> tuple[Episode, ...]:
        """Those that fire, and the last ones that are over."""
        return self._episodes.episodes

    @property
    def troubles(self) -> list[str]:
        """Why notices do not arrive."""
        return [each.trouble for each in self._channels if each.trouble]

    def look(self, state: MachineState, card_series: Mapping[str, int], wall: float, monotonic: float) -> list[Notice]:
        """Looks at all rules; tells what has begun or ended, and returns it."""
        used = {card.reading.uuid: card.reading.used_bytes for card in state.cards}
        needed = {series: (used[uuid] or 0, True) for uuid, series in card_series.items()}
        found: dict[float, dict[str, Outlook]] = {
            self._usual: {card.reading.uuid: card.outlook for card in state.cards if card.outlook is not None}
        }
        for horizon, planner in self._planners.items():
            planner.plan(needed, wall, monotonic)
            made = planner.outlooks
            found[horizon] = {uuid: made[series] for uuid, series in card_series.items() if series in made}
        bounds: Bounds = found
        notices = self._episodes.look(state, bounds, wall, monotonic)
        for notice in notices:
            for channel in self._channels:
                channel.put(notice)
        return notices

    def close(self) -> None:
        """Ends the threads, once they have told what they were given."""
        for channel in self._channels:
            channel.close()


def _open_episodes(database: Path) -> list[Episode]:
    with contextlib.suppress(sqlite3.Error, WatchError):
        history = StoredHistory(database)
        try:
            return history.open_episodes()
        finally:
            history.close()
    return []
