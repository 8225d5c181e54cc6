"""What the communicators of NCCL hold of a card, beside torch's allocator."""

import dataclasses

from tightfit.cost.traced_collectives import traced_communicator_bytes
from tightfit.devices.device import Device
from tightfit.devices.nodes import node_of
from tightfit.tape import Tape


def communicators_of(tape: Tape, device: Device) -> int:
    """Their bytes, on the node that ranks with such cards are on by default; none for a program of one rank."""
    return traced_communicator_bytes(tape, node_of(device)) if tape.num_ranks > 1 else 0


def beside(device: Device, num_bytes: int) -> Device:
    """The device with that much less memory for tensors."""
    return dataclasses.replace(device, capacity_bytes=device.capacity_bytes - num_bytes) if num_bytes else device
