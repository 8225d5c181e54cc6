"""Who the processes are, asked of the system once and again now and then: a PID may have passed to another process."""

from tightfit.watch.machine.readings import ProcessFacts
from tightfit.watch.sources.abstract_source import AbstractSource

_CHECK_SECONDS = 30
_KEPT_SECONDS = 120.0


class ProcessTable:
    """The facts of processes, by PID."""

    def __init__(self, source: AbstractSource) -> None:
        self._source = source
        self._known: dict[int, tuple[ProcessFacts, float, float]] = {}
        """Facts, when they were asked for, and when somebody last wanted them."""
        self._swept = 0.0

    def facts(self, pid: int, monotonic: float) -> ProcessFacts:
        """Whose process it is; at most half a minute old."""
        known = self._known.get(pid)
        if known is not None and monotonic - known[1] < _CHECK_SECONDS:
            if monotonic - known[2] >= _CHECK_SECONDS:
                self._known[pid] = (known[0], known[1], monotonic)
            return known[0]
        facts = self._source.facts(pid)
        # The first check comes at a moment of its own for each, so that not all are due at once.
        asked = monotonic if known is not None else monotonic - pid % _CHECK_SECONDS
        self._known[pid] = (facts, asked, monotonic)
        return facts

    def sweep(self, monotonic: float) -> None:
        """Forgets processes that nobody has wanted for two minutes."""
        if monotonic - self._swept >= _CHECK_SECONDS:
            self._swept = monotonic
            self._known = {pid: row for pid, row in self._known.items() if monotonic - row[2] < _KEPT_SECONDS}
