"""Notes on the tape of a traced run what Python of a technique will cost the processor in a real one."""

from tightfit.capture.processes.process_role import is_simulated
from tightfit.cost.host_python import HostWork, microseconds
from tightfit.units import KIB


def spends(work: HostWork, number: float = 1) -> None:
    """The host spends so much work here. Outside of a traced run it really does, and nothing is noted."""
    if not is_simulated():
        return
    # Only where a run is traced.
    from tightfit.capture.observe.streams import VirtualStream
    from tightfit.tape import WaitKind

    VirtualStream.recorder.waits.add(WaitKind.HOST_RUNS, event=microseconds(work, number))


def copies_in_memory(num_bytes: int) -> None:
    """The host copies so many bytes from one place in its memory to another, likewise."""
    if not is_simulated():
        return
    # Only where a run is traced.
    from tightfit.capture.observe.streams import VirtualStream
    from tightfit.tape import WaitKind

    # Each is read and written.
    VirtualStream.recorder.waits.add(WaitKind.HOST_UPDATES, event=-(-2 * num_bytes // KIB))
