"""What a process costs on a card before its first tensor, for cards on which nobody has measured it.

A CUDA context reserves memory per multiprocessor (stacks and local memory of every thread that can be resident, queues, the debugger's
and the scheduler's save areas) and loads the kernels that are used. So it grows with the number of multiprocessors, and that is the model.
"""

from tightfit.devices.device import Context
from tightfit.units import MIB

_FIXED_BYTES = 40 * MIB
_PER_MULTIPROCESSOR_BYTES = {"nvidia": 2.9 * MIB, "amd": 2.0 * MIB}


def modelled_context(*, vendor: str, num_multiprocessors: int) -> Context:
    """The context of a card with so many multiprocessors, with a range that covers what was seen on cards of its size."""
    num_bytes = _FIXED_BYTES + _PER_MULTIPROCESSOR_BYTES[vendor] * num_multiprocessors
    return Context(
        num_bytes=round(num_bytes),
        low_bytes=round(0.75 * num_bytes),
        high_bytes=round(1.35 * num_bytes),
        is_measured=False,
    )
