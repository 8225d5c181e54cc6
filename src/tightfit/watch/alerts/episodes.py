"""Turns conditions that come and go into episodes: each is told once when it begins and once when it is over."""

import dataclasses
from collections.abc import Iterable

from tightfit.watch.alerts.alert_rules import Rule
from tightfit.watch.alerts.conditions import Bounds, holding
from tightfit.watch.machine.machine_state import Episode, MachineState

_NUM_OVER = 50
_Key = tuple[str, str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """What is told: that an episode has begun (`fired`) or is over (`resolved`)."""

    event: str
    host: str
    episode: Episode

    def to_json(self) -> dict[str, object]:
        """Plain JSON types."""
        return {"schema": 1, "event": self.event, "host": self.host, **dataclasses.asdict(self.episode)}


class Episodes:
    """The episodes of all rules; those of an agent before this one go on."""

    def __init__(self, rules: tuple[Rule, ...], open_episodes: Iterable[Episode]) -> None:
        self._rules = rules
        self._firing: dict[_Key, Episode] = {(each.rule, each.subject): each for each in open_episodes}
        self._since: dict[_Key, float] = {}
        """Since when a condition that has not fired has held, or one that fires has not (monotonic seconds)."""
        self._over: list[Episode] = []

    @property
    def episodes(self) -> tuple[Episode, ...]:
        """Those that fire, and the last ones that are over; the newest first."""
        return tuple(sorted((*self._firing.values(), *self._over), key=lambda each: -each.fired_at))

    def look(self, state: MachineState, bounds: Bounds, wall: float, monotonic: float) -> list[Notice]:
        """What has begun or ended at this moment."""
        notices = []
        looked_at: set[_Key] = set()
        for rule in self._rules:
            if state.lost_since is not None and rule.kind != "driver":
                # Nobody knows whether it holds: it stays as it is.
                looked_at |= {key for key in (*self._firing, *self._since) if key[0] == rule.name}
                continue
            found = holding(rule, state, bounds)
            keys = {(rule.name, subject) for subject in found}
            looked_at |= keys
            for subject, message in found.items():
                notices += self._holds(rule, subject, message, state.host, wall, monotonic)
            for key in [key for key in self._firing if key[0] == rule.name and key not in keys]:
                looked_at.add(key)
                notices += self._holds_not(key, rule.for_seconds, state.host, wall, monotonic)
        # Of rules that are no longer there.
        for key in [key for key in self._firing if key not in looked_at]:
            notices += self._holds_not(key, 0.0, state.host, wall, monotonic)
        self._since = {key: since for key, since in self._since.items() if key in looked_at}
        return notices

    def _holds(self, rule: Rule, subject: str, message: str, host: str, wall: float, monotonic: float) -> list[Notice]:
        key = (rule.name, subject)
        if key in self._firing:
            self._since.pop(key, None)
            return []
        since = self._since.setdefault(key, monotonic)
        if monotonic - since < rule.for_seconds:
            return []
        del self._since[key]
        episode = Episode(rule=rule.name, subject=subject, message=message, fired_at=wall, resolved_at=None)
        self._firing[key] = episode
        return [Notice(event="fired", host=host, episode=episode)]

    def _holds_not(self, key: _Key, for_seconds: float, host: str, wall: float, monotonic: float) -> list[Notice]:
        since = self._since.setdefault(key, monotonic)
        if monotonic - since < for_seconds:
            return []
        del self._since[key]
        episode = dataclasses.replace(self._firing.pop(key), resolved_at=wall)
        self._over = [episode, *self._over][:_NUM_OVER]
        return [Notice(event="resolved", host=host, episode=episode)]
