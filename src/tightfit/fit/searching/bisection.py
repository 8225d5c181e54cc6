"""The limit that the solver is given, moved until the traced run of its answer just fits the budget."""

# Room of less than this share of the budget is not worth another trace.
_WORTH_ANOTHER_TRY = 0.02


class Bisection:
    """What the solver is given as its limit, until the trace of its answer just fits `budget_bytes`.

    By how much a trace holds more than was promised depends on the choices, so one correction may overshoot: the next limit always lies between
    the largest whose answer has fitted and the smallest whose answer has not. Where the excess does not shrink with the promise (whole segments, and
    the uncertainty of their peak, do not follow it), the step down is doubled each time.
    """

    def __init__(self, *, budget_bytes: int, limit: int) -> None:
        self.budget_bytes = budget_bytes
        self.limit = limit
        self._fitted: int | None = None
        self._exceeded: int | None = None
        self._excess = 0
        self._step = 0

    def narrow(self, *, promised: int, traced: int) -> bool:
        """Takes in the trace of the answer to the present limit; whether another limit is worth a try."""
        room = self.budget_bytes - traced
        if room >= 0:
            self._fitted = self.limit
        else:
            self._exceeded = self.limit
        if 0 <= room <= _WORTH_ANOTHER_TRY * self.budget_bytes:
            return False
        following = promised + room
        if room < 0:
            is_stuck = 0 < self._excess < 2 * -room
            self._step = 2 * self._step if is_stuck else -room
            self._excess = -room
            following = promised - self._step
        if self._fitted is not None and self._exceeded is not None:
            if self._exceeded - self._fitted < _WORTH_ANOTHER_TRY * self.budget_bytes / 4:
                return False
            if not self._fitted < following < self._exceeded:
                following = (self._fitted + self._exceeded) // 2
        elif (following <= self.limit) == (room >= 0):
            following = self.limit + room
        self.limit = following
        return True
