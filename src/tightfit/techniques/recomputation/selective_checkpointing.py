"""Selective checkpointing: a block saves the results of its matrix products and attention, and recomputes the cheap rest.

Korthikanti et al., "Reducing activation recomputation in large transformer models" (arXiv:2205.05198), section 5, with the choice made
per operator: those with more than a few operations per byte are saved.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, final

from tightfit.analysis.profile import Profile
from tightfit.analysis.recomputable import recompute_option
from tightfit.planner.option import Option
from tightfit.techniques.recomputation.kept_products import kept_products
from tightfit.techniques.technique import AbstractTechnique, ChosenOption, Needs

if TYPE_CHECKING:
    from tightfit.techniques.session import Session


@final
class SelectiveCheckpointing(AbstractTechnique):
    """Trades the cheap part of a second forward pass for the cheap part of what a block saves for backward."""

    name = "selective_checkpointing"
    exact = True
    needs = Needs.REPEATABLE
    exactness = "bit for bit, random state and autocast included; up to the order of a reduction where a decoder would fill a key-value cache"
    is_alike_in_batches = True

    def options(self, profile: Profile) -> Iterable[Option]:
        """One for each block, if saving some differs from saving all or none.

        Of the products, those are saved whose results the plain run saves; they are identified by their number in the block's forward.
        """
        for block in profile.blocks:
            kept = kept_products(profile, block)
            if kept is not None:
                option = recompute_option(self.name, profile, block, kept.is_kept)
                yield dataclasses.replace(option, settings=kept.settings)

    def apply(self, session: "Session", chosen: Sequence[ChosenOption]) -> None:
        """Wraps the forward of each block."""
        from tightfit.techniques.recomputation.apply_selective_checkpointing import apply_selective_checkpointing

        apply_selective_checkpointing(session, chosen)
