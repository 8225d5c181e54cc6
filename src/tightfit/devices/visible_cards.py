"""Which GPUs of a machine a CUDA program sees, and in which order.

`CUDA_VISIBLE_DEVICES` names them by place or by UUID; the places are those of `CUDA_DEVICE_ORDER`: the fastest first, unless it is `PCI_BUS_ID`, which is the
order that the driver lists them in. Source: the CUDA programming guide, "CUDA environment variables".
"""

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from tightfit.devices.catalogue import find
from tightfit.errors import UnknownDevice

Card = TypeVar("Card")


def visible_cards(
    cards: Sequence[Card], *, uuid_of: Callable[[Card], str], name_of: Callable[[Card], str]
) -> list[Card]:
    """Those of `cards`, which are in the driver's order, that a program of this environment sees, its `cuda:0` first. Where a part of a GPU is named (MIG), all are."""
    ordered = list(cards)
    if os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        ordered.sort(key=lambda card: -_speed(name_of(card)))
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None or "MIG-" in named:
        return ordered
    found: list[Card] = []
    for word in map(str.strip, named.split(",")):
        if word.isdigit():
            chosen = ordered[int(word) : int(word) + 1]
        else:
            chosen = [card for card in ordered if word.startswith("GPU-") and uuid_of(card).startswith(word)]
        # The first that is not there ends the list.
        if len(chosen) != 1 or chosen[0] in found:
            break
        found += chosen
    return found


def _speed(name: str) -> float:
    """FLOP/s in float32; of cards of one kind alike, so that they stay in the driver's order."""
    try:
        return find(name).flops_per_second("float32")
    except UnknownDevice:
        return 0.0
