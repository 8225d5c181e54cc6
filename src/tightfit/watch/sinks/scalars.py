"""A machine as named numbers, as TensorBoard and Weights & Biases take them."""

from collections.abc import Iterator

from tightfit.units import GIB
from tightfit.watch.machine.machine_state import MachineState


def scalars(state: MachineState) -> Iterator[tuple[str, float]]:
    """Names and values: memory in GiB, shares from 0 to 1."""
    for card in state.cards:
        reading, name = card.reading, f"gpu{card.reading.index}"
        values = {
            "memory_gib": None if reading.used_bytes is None else reading.used_bytes / GIB,
            "utilization": reading.utilization,
            "power_watts": reading.power_watts,
            "next_hour_gib": None if card.outlook is None else card.outlook.upper_bytes / GIB,
        }
        yield from ((f"{name}/{key}", value) for key, value in values.items() if value is not None)
