"""The processor's time of this package's own Python that runs in every step of a plan, beside the operators that it runs, which are priced as any others.

Eager torch is as fast as its host: a plan whose wrappers keep the processor busy takes longer on a card that waits for it. Measured by
`python -m benchmarks.wrappers` on one core of a server of 2.5 GHz (`NUM_LAYERS` small layers, where a plain step takes 14 ms): what a step takes beyond the plain one
and beyond the forwards that are run again, by place, for tiles with 2, 4 and 8 of them; for recomputation by twelve kinds of blocks with 3 to 160 saved tensors, on which it hangs: 80 modules
that save nothing take 0.15 ms. `tightfit calibrate` times a fixed piece of Python
on another processor, by which all of it is scaled: what a kernel takes to be issued is the driver's time as well.
"""

import enum

from tightfit.cost.host_bandwidth import HOST_BYTES_PER_SECOND
from tightfit.tape import Tape, WaitKind
from tightfit.units import KIB

REFERENCE_SECONDS = 0.36e-3
"""What `reference_work` took where these were measured."""
_NUM_CELLS = 1_000


MICROSECOND = 1e-6


class HostWork(enum.Enum):
    """A kind of work with its seconds of processor time."""

    RECOMPUTED_CALL = 0.5e-3
    """A call of a recomputed region, both of its runs together."""
    RECOMPUTED_TENSOR = 0.016e-3
    """Each tensor that it saves, weights among them, for which torch calls hooks in either run and in the backward pass."""
    SELECTED_TENSOR = 0.04e-3
    """Each that is saved by a region that keeps some results: a mode sees each operator in Python."""
    OFFLOADED_CALL = 1.0e-3
    """A call whose saved tensors move."""
    UPDATED_PARAMETER = 0.25e-3
    """An update within a second backward pass, whose gradient is compared with the first one's."""
    OFFLOADED_PARAMETER = 0.19e-3
    """An update whose states come to the card, or that the host makes."""
    STREAMED_CALL = 0.2e-3
    """A call of a module whose weights come to the card, in either pass."""
    STREAMED_PARAMETER = 0.1e-3
    """Each weight of it."""
    MICRO_BATCHED_MODULE = 0.02e-3
    """Each module of a model whose batch is run in parts, whose state is looked at in each step."""
    MODULE_IN_PART = 0.037e-3
    """The same in each part: the functions of torch that it calls, and its nodes in the graph, are looked at."""
    TILED_CALL = 1.2e-3
    """A call of a module that is run in tiles, both passes together."""
    TILE = 0.2e-3
    """Each of its tiles, whose calls of functions of torch are compared with those that were proved."""
    BATCH_COPY = 0.06e-3
    """A tensor that is copied to the card through a ring, beside its bytes."""
    CHUNKED_LOSS = 0.5e-3
    """A call of a loss head whose logits are not computed at once, beside the kernels of its chunks."""


def microseconds(work: HostWork, number: float = 1) -> int:
    """Of so much work, as the tape has it."""
    return round(work.value * number / MICROSECOND)


def seconds_of_own_work(tape: Tape, begin: int, end: int) -> float:
    """Of the host among operators `[begin, end)`, besides issuing them: Python of techniques, and updates that it makes itself."""
    waits = tape.waits
    inside = (waits.operator >= begin) & (waits.operator < end)
    microseconds_of_python = waits.event[inside & (waits.kind == WaitKind.HOST_RUNS)].sum(dtype=float)
    updated_kib = waits.event[inside & (waits.kind == WaitKind.HOST_UPDATES)].sum(dtype=float)
    return float(microseconds_of_python * MICROSECOND + updated_kib * KIB / HOST_BYTES_PER_SECOND)


class _Cell:
    """An object with attributes, as wrappers read them."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.rows = {number: (number, number)}


def reference_work() -> int:
    """A fixed piece of Python, of calls, attributes, tuples and dicts: what it takes tells processors apart."""
    total = 0
    for cell in [_Cell(number) for number in range(_NUM_CELLS)]:
        total += sum(map(len, cell.rows.values())) + cell.number
    return total
