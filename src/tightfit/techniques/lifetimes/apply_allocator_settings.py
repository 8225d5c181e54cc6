"""Puts `allocator_settings` on live objects: see `tightfit.techniques.lifetimes.allocator_settings` for what it is and where it comes from."""

from collections.abc import Sequence

import torch

from tightfit.techniques.session import Session
from tightfit.techniques.technique import ChosenOption


def apply_allocator_settings(session: Session, chosen: Sequence[ChosenOption]) -> None:
    """Changes the settings of the running process if there is a card; `tightfit run` sets them before the program starts."""
    if torch.backends.cuda.is_built() and torch.cuda.is_initialized() and torch.version.cuda:
        for choice in chosen:
            _set(choice.settings["alloc_conf"])


def _set(alloc_conf: str) -> None:
    # The one place that names this private function of torch: there is no public one that works once CUDA has begun.
    torch.cuda.memory._set_allocator_settings(alloc_conf)
