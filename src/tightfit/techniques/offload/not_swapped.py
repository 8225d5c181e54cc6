"""Refuses that a streamed weight is exchanged for another tensor as a whole."""

import functools
import weakref
from typing import Any

import torch

from tightfit.effects.state import MOVED
from tightfit.techniques.session import Session
from tightfit.torch_hooks.swapped_tensors import on_swap


def refuse_swaps(session: Session, technique: str) -> None:
    """Refuses it until the session is undone."""
    owner = _Streamed(session, technique)
    session.when_undone(functools.partial(_leave, on_swap(owner), owner))


def _leave(leave: Any, _: object) -> None:
    leave()


class _Streamed:
    def __init__(self, session: Session, technique: str) -> None:
        self._verdict, self._technique = session.verdict, technique
        self._model = weakref.ref(session.model)

    def before_swap(self, one: torch.Tensor, other: torch.Tensor) -> None:
        """As `tightfit.torch_hooks.swapped_tensors.SwapOwner`."""
        model = self._model()
        own = {id(each) for each in model.parameters()} if model is not None else ()
        swapped = next((each for each in (one, other) if each in MOVED and id(each) in own), None)
        if swapped is not None:
            raise self._verdict.refuse(
                f"a streamed weight of shape {tuple(swapped.shape)} is swapped with another tensor "
                f"(torch.utils.swap_tensors); leave streaming out: tightfit plan --without {self._technique}",
                technique=self._technique,
            )
