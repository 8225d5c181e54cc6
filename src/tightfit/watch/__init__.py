"""Watches the GPUs of one machine: who uses how much memory, what came before, and what the next hour needs. No torch.

`agent/` is the one reader of a machine: it asks a source (`sources/`) at most every second, keeps the answers in SQLite (`store/`), forecasts (`outlook/`) and alerts
(`alerts/`). What people look at (`terminal/`, `web/`, `metrics/`, `sinks/`) shows a `MachineState` (`machine/`), which the agent has in memory and any other process reads
from the store. A training program adds the counters of torch's allocator with one line: `tightfit.watch.publish()`.
"""

from tightfit.watch.publishing.publish import publish

__all__ = ["publish"]
