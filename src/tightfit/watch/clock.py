"""The clocks of this machine behind one interface, so that a day can be simulated in minutes."""

import abc
import threading
import time


class AbstractClock(abc.ABC):
    """Where an agent takes the time from."""

    @abc.abstractmethod
    def wall(self) -> float:
        """Unix seconds, as people set them: it can jump either way."""

    @abc.abstractmethod
    def monotonic(self) -> float:
        """Seconds that never go back; their zero means nothing."""

    @abc.abstractmethod
    def wait(self, seconds: float, until: threading.Event) -> bool:
        """Waits, or returns True as soon as `until` is set."""


class SystemClock(AbstractClock):
    """The clocks of the machine."""

    def wall(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        # Where there is one, a clock that goes on while the machine sleeps: what passes then is a gap, and no jump of the wall clock.
        return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()

    def wait(self, seconds: float, until: threading.Event) -> bool:
        return until.wait(max(0.0, seconds))


class SimulatedClock(AbstractClock):
    """A clock that stands still until somebody waits, and then is at the end of the wait."""

    def __init__(self, start: float = 1_700_000_000.0) -> None:
        self.now = start
        self.offset = 0.0
        """By so much the wall clock is ahead of the monotonic one: set it to let the clock jump."""

    def wall(self) -> float:
        return self.now + self.offset

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float, until: threading.Event) -> bool:
        self.now += max(0.0, seconds)
        return until.is_set()
