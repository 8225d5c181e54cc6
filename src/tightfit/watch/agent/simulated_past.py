"""A past for a simulated machine, so that it has a history and forecasts from the start."""

import dataclasses
import time
from pathlib import Path

from tightfit.watch.agent.agent import Agent, AgentSettings
from tightfit.watch.alerts.alert_rules import AlertSettings
from tightfit.watch.clock import SimulatedClock
from tightfit.watch.sources.simulated import SimulatedMachine, SimulatedSource

_HOURS = 6
_STEP_SECONDS = 60.0
_UNLIMITED = 1e9


def write_past(machine: SimulatedMachine, database: Path, settings: AgentSettings) -> None:
    """Writes the last hours into the history, a reading a minute, as if an agent had been there; the last one makes all forecasts."""
    clock = SimulatedClock(time.time() - _HOURS * 3600)
    for share, count in ((0.0, _HOURS * 60 - 1), (_UNLIMITED, 1)):
        outlooks = dataclasses.replace(settings.outlooks, share=share)
        # Nobody is told of what did not happen.
        quiet = dataclasses.replace(settings, outlooks=outlooks, alerts=AlertSettings(rules=()), listen_at=None)
        agent = Agent(SimulatedSource(machine), database, clock, quiet)
        for _ in range(count):
            agent.tick()
            clock.now += _STEP_SECONDS
        agent.close()
