"""Chooses how a run is recorded: on the card where there is one, and otherwise on the host."""

import torch

from tightfit.runtime.record_card import CardRecorder
from tightfit.runtime.record_host import HostRecorder


def new_recorder(*, stacks: bool, max_events: int) -> CardRecorder | HostRecorder:
    """A recorder that has not begun. Where there is a card it keeps the last `max_events` events; on the host, all."""
    if torch.cuda.is_available():
        return CardRecorder(stacks=stacks, max_events=max_events)
    return HostRecorder(stacks=stacks)
