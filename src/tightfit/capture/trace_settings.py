"""How a program is traced, for every command and function that traces one: a new setting is a field here, which the command line has at once."""

import dataclasses
from typing import Literal

Steps = int | Literal["all"]
DEFAULT_NUM_STEPS = 3
DEFAULT_TIMEOUT_SECONDS = 120.0
"""How long a program may take to its first step, and from each step to the next."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TraceSettings:
    """How far a program is traced, and what it may do meanwhile.

    Parameters
    ----------
    steps
        How many steps to trace, 3 if not given, before loops are left and what comes later (evaluation ...) is traced; all: no loop is left.
    until
        A line of the script (120, or FILE.py:120) at which the trace ends; no loop is left before.
    timeout
        Seconds to wait for the first step, and for each next one, 120 if not given.
    largest_batch
        Look through the data sets of the program's data loaders for the largest batch, for a bounded time, and give it to the last two steps traced.
    show_output
        Show the output of the workload, on stderr.
    allow_writes
        Let the program write files for real. Otherwise it sees its own writes, and they are dropped after the trace.
    allow_network
        Let the program reach other machines, for downloads that are not cached yet.
    """

    steps: Steps = DEFAULT_NUM_STEPS
    until: str | None = None
    timeout: float = DEFAULT_TIMEOUT_SECONDS
    largest_batch: bool = False
    show_output: bool = False
    allow_writes: bool = False
    allow_network: bool = False


AS_USUAL = TraceSettings()
