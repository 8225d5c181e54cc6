"""How long a solver may search, counted in what it does and not by a clock: so a plan is the same on a busy machine, on a slow one, and the next time."""

import time
from typing import Any

# HiGHS asks whether it is to stop at points of its search that depend on the program alone. Between two of them it works about in proportion to the
# coefficients: 0.3 to 1.5 microseconds for each, over programs of 17 plans (docs/log.md, "Plans that do not depend on the clock").
_SECONDS_OF_A_TURN = 7e-7
# An iteration of the simplex method where nothing is integer, measured likewise.
_SECONDS_OF_AN_ITERATION = 5e-9
# The first of several programs that share a limit must not leave the next ones with nothing.
_LEAST_SECONDS = 0.05
# Programs that are unlike all that were measured end all the same: by the processor's time first, which other processes add little to.
_MOST_TIMES_THE_SECONDS, _MORE_SECONDS, _CLOCK_TIMES_THE_PROCESSOR = 5.0, 1.0, 10.0


class SolverWork:
    """Work that takes about `seconds` of a processor of 2023, to be shared by several programs."""

    def __init__(self, seconds: float) -> None:
        self.seconds_left = seconds

    @property
    def is_over(self) -> bool:
        """Whether nothing is left."""
        return self.seconds_left <= 0

    def part(self, seconds: float) -> "SolverWork":
        """At most so much of what is left now, to be done besides."""
        return SolverWork(min(self.seconds_left, seconds))

    def run(self, solver: Any) -> None:
        """Runs HiGHS until it has solved its program or what is left is done; its solution is the best so far then."""
        seconds = max(_LEAST_SECONDS, self.seconds_left)
        num_coefficients = max(1, solver.getNumNz())
        most = seconds * _MOST_TIMES_THE_SECONDS + _MORE_SECONDS
        end, done = time.thread_time() + most, 0.0

        def turn(event: Any) -> None:
            nonlocal done
            done += num_coefficients * _SECONDS_OF_A_TURN
            if done > seconds or time.thread_time() > end:
                event.data_in.user_interrupt = True

        solver.setOptionValue("time_limit", most * _CLOCK_TIMES_THE_PROCESSOR)
        solver.cbMipInterrupt += turn
        try:
            solver.run()
        finally:
            solver.cbMipInterrupt -= turn
        if not done:
            done = max(0, solver.getInfo().simplex_iteration_count) * num_coefficients * _SECONDS_OF_AN_ITERATION
        self.seconds_left -= done
