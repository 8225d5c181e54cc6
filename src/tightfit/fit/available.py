"""What is left of a GPU where other processes hold part of its memory: given by the user, or read from the driver for the machine's own GPU."""

import dataclasses
from typing import TypeVar

from tightfit.calibration.nvml_ctypes import Nvml
from tightfit.devices.device import Device
from tightfit.devices.visible_cards import visible_cards
from tightfit.errors import UsageError
from tightfit.reports.plans import Plan
from tightfit.reports.results import Estimate
from tightfit.tape import Assumption
from tightfit.units import MIB, format_bytes, to_bytes

Used = str | int | None
"""What other processes hold on the card: a size ("3GiB", "10%"), bytes, or None for nothing."""

Answer = TypeVar("Answer", Estimate, Plan)
# Below this the difference is between the catalogue's capacity and this driver's, and not a process.
_NOISE_BYTES = 64 * MIB


def used_bytes_of(card: Device, used: Used) -> int:
    """The bytes of `card` that `used` means.

    Raises:
        UsageError: it is no size, or nothing would be left.
    """
    if used is None:
        # Of a memory that the host shares some is never free.
        return card.system_bytes
    num_bytes = to_bytes(used, "used", whole_bytes=card.capacity_bytes)
    if num_bytes >= card.capacity_bytes:
        raise UsageError(
            f"used {format_bytes(num_bytes)}: a process can have {format_bytes(card.capacity_bytes)} of {card.name}, so nothing would be left"
        )
    return num_bytes


def used_on_own_card(card: Device, nvml: Nvml | None) -> int:
    """The bytes that other processes hold now on the first GPU that a program sees, which is `card`; 0 if the driver does not say."""
    cards = [] if nvml is None else [(uuid, nvml.name(handle), handle) for uuid, handle in nvml.cards().items()]
    seen = visible_cards(cards, uuid_of=lambda each: each[0], name_of=lambda each: each[1])
    first = seen[0][2] if seen else None
    free_bytes = None if nvml is None or first is None else nvml.free_bytes(first)
    if free_bytes is None:
        return 0
    # By what is free and not by what is used, which includes memory that the driver keeps for itself and no process can have.
    used_bytes = card.capacity_bytes - free_bytes
    return used_bytes if used_bytes >= _NOISE_BYTES else 0


def without_used(card: Device, used_bytes: int) -> Device:
    """`card` with the capacity that is left."""
    return dataclasses.replace(card, capacity_bytes=card.capacity_bytes - used_bytes)


def with_note(answer: Answer, card: Device, used_bytes: int) -> Answer:
    """`answer`, which says first that part of `card`, as it is when empty, was not available."""
    if not used_bytes:
        return answer
    note = Assumption(where=card.name, what=in_use(card, used_bytes))
    return dataclasses.replace(answer, assumptions=(note, *answer.assumptions))


def in_use(card: Device, used_bytes: int) -> str:
    """The sentence about it."""
    left = format_bytes(card.capacity_bytes - used_bytes)
    if card.shares_host_memory:
        return f"its memory is the host's too, where other programs hold {format_bytes(used_bytes)} of {format_bytes(card.capacity_bytes)}: {left} are available, to what the program keeps at the host as well, which is not counted"
    return f"other processes hold {format_bytes(used_bytes)} of its {format_bytes(card.capacity_bytes)}: {left} are available"
