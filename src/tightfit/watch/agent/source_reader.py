"""Asks a source, and keeps count of it when its driver is away."""

from tightfit.watch.machine.readings import Reading
from tightfit.watch.sources.abstract_source import AbstractSource, SourceLost

_MAX_PAUSE_SECONDS = 30.0


class SourceReader:
    """A source that may be away: `lost_since` (Unix seconds) and `lost_reason` say so. It is asked again after 1, 2, 4, ... and at most 30 seconds."""

    def __init__(self, source: AbstractSource) -> None:
        self.source = source
        self.lost_since: float | None = None
        self.lost_reason = ""
        self._pause = 0.0
        self._next = 0.0

    def read(self, wall: float, monotonic: float) -> Reading | None:
        """The reading, or None while the driver does not answer."""
        if self.lost_since is not None and monotonic < self._next:
            return None
        try:
            reading = self.source.read(wall)
        except SourceLost as error:
            if self.lost_since is None:
                self.lost_since, self._pause = wall, 0.5
            self.lost_reason = str(error)
            self._pause = min(2 * self._pause, _MAX_PAUSE_SECONDS)
            self._next = monotonic + self._pause
            return None
        self.lost_since, self.lost_reason = None, ""
        return reading
