"""Chooses the recorder of a run: on the card if there is one, otherwise on the host."""

import torch

from tightfit.runtime.record_card import CardRecorder
from tightfit.runtime.record_host import HostRecorder


def new_recorder(*, stacks: bool, max_events: int) -> CardRecorder | HostRecorder:
    """A recorder that is not started yet. On a card it keeps the last `max_events` events; on the host, all."""
    if torch.cuda.is_available():
        return CardRecorder(stacks=stacks, max_events=max_events)
    return HostRecorder(stacks=stacks)
