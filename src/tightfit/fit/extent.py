"""How much of a program is traced (the steps asked for, and the line at which the trace ends), and what it may do, from the settings of a trace."""

import dataclasses
import sys
from pathlib import Path

from tightfit.capture.processes.containment.policy import Policy
from tightfit.capture.targets.target_kinds import Script, Target
from tightfit.capture.trace_settings import DEFAULT_NUM_STEPS, TraceSettings
from tightfit.errors import UsageError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """`num_steps` to trace, after which a script's loops are left; `until` is a line (file, line) before which the trace ends. `largest_batch_from`: the
    number of steps after which data loaders give their largest batch.
    """

    num_steps: int
    until: tuple[str, int] | None = None
    largest_batch_from: int | None = None


def policy_of(tracing: TraceSettings) -> Policy:
    """What the program may do to this machine."""
    return Policy(allow_writes=tracing.allow_writes, allow_network=tracing.allow_network)


def extent_of(target: Target, tracing: TraceSettings) -> Extent:
    """The extent that the settings ask for; `until` is a line of the script, or `FILE.py:LINE` of a module that it imports.

    Raises:
        UsageError: there is no such line, or the target does not end by itself.
    """
    steps, until = tracing.steps, tracing.until
    if steps != "all" and steps < 1:
        raise UsageError(f"steps is {steps}: at least one step must be traced")
    if steps == "all" and not isinstance(target, Script):
        raise UsageError("--steps all: only a script ends by itself; say how many steps, such as --steps 10")
    # Frameworks ask for a batch one step before they use it.
    known = DEFAULT_NUM_STEPS if steps == "all" or until is not None else steps
    largest_batch_from = max(0, known - 2) if tracing.largest_batch else None
    if until is None:
        return Extent(num_steps=sys.maxsize if steps == "all" else steps, largest_batch_from=largest_batch_from)
    if not isinstance(target, Script):
        raise UsageError(f"--until {until}: only the lines of a script can be waited for")
    name, _, line = str(until).rpartition(":")
    file = Path(name or target.path)
    if not line.isdigit() or not file.is_file() or not 0 < int(line) <= len(file.read_bytes().splitlines()):
        raise UsageError(
            f"--until {until}: write a line of the script, such as 120, or FILE.py:LINE; there is no such line"
        )
    # Nothing on the way to that line is left out.
    return Extent(num_steps=sys.maxsize, until=(str(file.resolve()), int(line)), largest_batch_from=largest_batch_from)
