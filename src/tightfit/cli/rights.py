"""The options that say what a program may do to this machine while it is traced."""

import dataclasses

from cyclopts import Group, Parameter


@Parameter(name="*", group=Group("What the program may do while it is traced", sort_key=3))
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """What a traced program may do; see `tightfit.capture.containment.policy.Policy`.

    Parameters
    ----------
    allow_writes
        Let it write files for real. Without this it sees what it writes, and that is dropped after the trace.
    allow_network
        Let it reach other machines: for downloads that are not in a cache yet.
    """

    allow_writes: bool = False
    allow_network: bool = False


NO_RIGHTS = Rights()
