"""Checkpointing: a block's activations are freed after its forward pass and recomputed for its backward pass.

Chen et al., "Training deep nets with sublinear memory cost" (arXiv:1604.06174), per block of the module tree, whichever blocks the plan names.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, final

from tightfit.analysis.profile import Profile
from tightfit.analysis.recomputable import recompute_option
from tightfit.planner.option import Option
from tightfit.techniques.technique import AbstractTechnique, ChosenOption, Needs

if TYPE_CHECKING:
    from tightfit.techniques.session import Session

RECURRENT = ("aten._cudnn_rnn", "aten.miopen_rnn", "aten.lstm.", "aten.gru.", "aten.rnn_")


@final
class Checkpointing(AbstractTechnique):
    """Trades a second forward pass of a block for everything that it saves for backward except its input."""

    name = "checkpointing"
    exact = True
    needs = Needs.REPEATABLE
    exactness = "bit for bit, random state and autocast included; up to the order of a reduction where a decoder would fill a key-value cache"
    is_alike_in_batches = True

    def options(self, profile: Profile) -> Iterable[Option]:
        """One option for each block; it shares slots with the modules inside and around it."""
        return [recompute_option(self.name, profile, block) for block in profile.blocks]

    def reason(self, profile: Profile) -> str:
        """What the model has in place of blocks."""
        if profile.blocks:
            return ""
        if any(name.startswith(RECURRENT) for name in profile.tape.strings):
            return (
                "a recurrent layer is one kernel, which needs its own inputs and results in the backward pass: "
                "recomputed, it would hold as much"
            )
        return "no module that is made of submodules, the whole model aside, saves activations: a single layer mostly saves its own input"

    def apply(self, session: "Session", chosen: Sequence[ChosenOption]) -> None:
        """Wraps the forward of each block."""
        from tightfit.techniques.recomputation.apply_checkpointing import apply_checkpointing

        apply_checkpointing(session, chosen)
