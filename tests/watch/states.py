"""States of a machine, made up for the tests of what shows them."""

from tests.watch.machines import card

from tightfit.units import GIB
from tightfit.watch.machine.machine_state import CardState, MachineState, Outlook, ProcessState
from tightfit.watch.machine.printable import printable
from tightfit.watch.machine.readings import ProcessFacts

NOW = 1_700_000_000.0


def outlook(median: int, upper: int) -> Outlook:
    return Outlook(
        made_at=NOW,
        horizon_seconds=3600.0,
        quantile=0.975,
        median_bytes=median,
        upper_bytes=upper,
        growth_bytes_per_hour=0,
        model="level_conditioned",
        note="",
    )


def process(pid: int, used: int | None, *, command: str = "python train.py", index: int = 0) -> ProcessState:
    facts = ProcessFacts(
        pid=pid, identity=f"b:{pid}", started=NOW - 60.0 * pid, user="ada", command=printable(command), container=""
    )
    return ProcessState(
        facts=facts,
        card=f"GPU-{index}",
        used_bytes=used,
        allocated_bytes=None,
        reserved_bytes=None,
        outlook=outlook(used, used + GIB) if used else None,
    )


def machine(num_cards: int = 2, processes: tuple[ProcessState, ...] | None = None) -> MachineState:
    cards = tuple(
        CardState(
            reading=card(used_bytes=(10 + i) * GIB, uuid=f"GPU-{i}", index=i), outlook=outlook(12 * GIB, 70 * GIB)
        )
        for i in range(num_cards)
    )
    some = (process(10, 3 * GIB), process(11, 6 * GIB, index=1), process(12, 4 * GIB), process(13, None, index=1))
    return MachineState(
        host="node-1",
        time=NOW,
        source="NVML",
        interval_seconds=1.0,
        lost_since=None,
        lost_reason="",
        cards=cards,
        processes=some if processes is None else processes,
        episodes=(),
        notes=(),
    )
