"""The time of readings: that of the wall clock as long as it goes forward, and never back."""

_MIN_JUMP_SECONDS = 5.0


class ReadingClock:
    """Times in whole milliseconds that grow with every reading. Where the wall clock is set back, time goes on as the monotonic clock does, until the wall clock has caught up."""

    def __init__(self, last: int) -> None:
        """`last` is the time of the last reading in the history, 0 without one."""
        self._last = last
        self._wall: float | None = None
        self._monotonic = 0.0
        self.note = ""
        """What the clock did, for people; empty if it only went on."""

    def advance(self, wall: float, monotonic: float) -> int:
        """The time of a reading at which the clocks say this, in seconds."""
        elapsed = 0.0 if self._wall is None else max(0.0, monotonic - self._monotonic)
        if self._wall is not None:
            jump = wall - self._wall - elapsed
            if abs(jump) >= _MIN_JUMP_SECONDS:
                self.note = (
                    f"the clock of the machine was set {'forward' if jump > 0 else 'back'} by {abs(jump):,.0f} seconds"
                )
        time = round(wall * 1000)
        # Half: a clock that is slewed, and so runs a little slow, is still the wall clock.
        if time < self._last + max(1, round(elapsed * 500)):
            time = self._last + max(1, round(elapsed * 1000))
        self._last, self._wall, self._monotonic = time, wall, monotonic
        return time
