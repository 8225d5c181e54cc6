"""Allocator settings: expandable segments, which let the caching allocator grow a segment instead of asking for another.

PyTorch's notes on CUDA memory management, `PYTORCH_CUDA_ALLOC_CONF`. It costs no time per step; its saving, reserved but unused memory, is found
by replaying the traced run with it.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, final

from tightfit.analysis.profile import Profile
from tightfit.planner.option import Option
from tightfit.techniques.technique import AbstractTechnique, ChosenOption

if TYPE_CHECKING:
    from tightfit.techniques.session import Session

EXPANDABLE = "expandable_segments:True"


@final
class ExpandableSegments(AbstractTechnique):
    """Costs nothing: the same blocks at other addresses."""

    name = "allocator_settings"
    exact = True
    exactness = "bit for bit: every operator runs unchanged"
    of_the_allocator = True

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

    def apply(self, session: "Session", chosen: Sequence[ChosenOption]) -> None:
        """Changes the settings of the running process if there is a card; `tightfit run` sets them before the program starts."""
        from tightfit.techniques.lifetimes.apply_allocator_settings import apply_allocator_settings

        apply_allocator_settings(session, chosen)
