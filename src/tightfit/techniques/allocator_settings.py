"""Allocator settings: expandable segments, which let the caching allocator grow a segment instead of asking for another.

PyTorch's notes on CUDA memory management, `PYTORCH_CUDA_ALLOC_CONF`. It costs no time per step; its saving, reserved but unused memory, is found
by replaying the traced run with it.
"""

from collections.abc import Iterable, Sequence
from typing import final

import torch

from tightfit.analysis.profile import Profile
from tightfit.planner.option import Option
from tightfit.techniques.session import Session
from tightfit.techniques.technique import AbstractTechnique, Choice

EXPANDABLE = "expandable_segments:True"


@final
class AllocatorSettings(AbstractTechnique):
    """Costs nothing: the same blocks at other addresses."""

    name = "allocator_settings"
    exact = True
    exactness = "bit for bit: every operator runs unchanged"

    def options(self, profile: Profile) -> Iterable[Option]:
        """One option: expandable segments."""
        yield Option(
            technique=self.name,
            where="allocator",
            settings={"alloc_conf": EXPANDABLE},
            changes=(),
            seconds=0.0,
            exact=True,
            slots=frozenset({"allocator"}),
            alloc_conf=EXPANDABLE,
        )

    def apply(self, session: Session, chosen: Sequence[Choice]) -> None:
        """Changes the settings of the running process if there is a card; `tightfit run` sets them before the program starts."""
        if torch.backends.cuda.is_built() and torch.cuda.is_initialized() and torch.version.cuda:
            for choice in chosen:
                _set(choice.settings["alloc_conf"])


def _set(alloc_conf: str) -> None:
    # The one place that names this private function of torch: there is no public one that works once CUDA has begun.
    torch.cuda.memory._set_allocator_settings(alloc_conf)
