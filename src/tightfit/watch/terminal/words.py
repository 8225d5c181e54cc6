"""Short forms of figures for narrow columns; `-` is what nobody knows."""

from tightfit.units import GIB, MIB
from tightfit.watch.machine.machine_state import MachineState, Outlook, ProcessState
from tightfit.watch.machine.readings import CardReading


def size(count: int | None) -> str:
    """`45.2G`, `812M`: binary units, as nvidia-smi and nvitop have them."""
    if count is None:
        return "-"
    return f"{count / GIB:.1f}G" if count >= GIB else f"{count / MIB:.0f}M"


def memory(card: CardReading) -> str:
    """`45.2/80.0G`."""
    return f"{size(card.used_bytes).removesuffix('G')}/{size(card.total_bytes)}"


def share(card: CardReading) -> float | None:
    """Used memory as a share of all."""
    if card.used_bytes is None or not card.total_bytes:
        return None
    return min(1.0, card.used_bytes / card.total_bytes)


def percent(part: float | None) -> str:
    """`57%`."""
    return "-" if part is None else f"{100 * part:.0f}%"


def bound(outlook: Outlook | None) -> str:
    """The median and the upper bound of the next hour's peak: `52.3G ≤58.0G`; one figure where they are the same."""
    if outlook is None:
        return "-"
    median, upper = size(outlook.median_bytes), size(outlook.upper_bytes)
    return f"≤{upper}" if median == upper else f"{median} ≤{upper}"


def age(process: ProcessState, now: float) -> str:
    """How long it has been running: `45s`, `12min`, `3.4h`, `2.1d`."""
    if process.facts.started is None:
        return "-"
    seconds = max(0.0, now - process.facts.started)
    if seconds < 60:
        return f"{seconds:.0f}s"
    if seconds < 3600:
        return f"{seconds / 60:.0f}min"
    return f"{seconds / 3600:.1f}h" if seconds < 86400 else f"{seconds / 86400:.1f}d"


def since(seconds: float) -> str:
    """A span of time: `35 s`, `12 min`, `3.4 h`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def warnings(state: MachineState, now: float) -> list[str]:
    """What is wrong with the watching itself: a driver that is away, an agent that has ended, a full disk."""
    found = list(state.notes)
    if state.lost_since is not None:
        found.insert(0, f"the driver has not answered for {since(now - state.lost_since)}: {state.lost_reason}")
    elif now - state.time > 5 * state.interval_seconds + 5:
        found.insert(0, f"the last reading is {since(now - state.time)} old")
    return found
