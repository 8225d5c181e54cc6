"""Computes the linear head and its cross-entropy in chunks, in unmodified models.

The head's `forward` returns deferred logits (`deferred_logits`); the model's own code applies its operators to them, and where they reach a
cross-entropy it is computed chunk by chunk (`chunked_cross_entropy`).
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, final

from tightfit.analysis.profile import Profile
from tightfit.planner.option import Option
from tightfit.techniques.loss_head.loss_options import loss_head_options
from tightfit.techniques.technique import AbstractTechnique, ChosenOption, Needs

if TYPE_CHECKING:
    from tightfit.techniques.session import Session


@final
class ChunkedLoss(AbstractTechnique):
    """The linear head and its cross-entropy without materialised logits."""

    name = "chunked_loss"
    exact = True
    needs = Needs.DIVISIBLE
    exactness = "the same up to the order of sums and one rounding; the gradient of a weight in half precision is summed in float32"
    is_alike_in_batches = True

    def options(self, profile: Profile) -> Iterable[Option]:
        """For each head several numbers of chunks, with the gradients in either pass."""
        yield from loss_head_options(self.name, profile)

    def reason(self, profile: Profile) -> str:
        """What is missing of a linear head and a cross-entropy behind it."""
        if profile.loss_heads:
            return ""
        if "aten._log_softmax" not in profile.tape.strings:
            return "the program computes no cross-entropy"
        return (
            "no linear layer was found whose output goes straight into the cross-entropy: a separate bias, a "
            "scale or a cast may be in between"
        )

    def apply(self, session: "Session", chosen: Sequence[ChosenOption]) -> None:
        """Wraps the head's `forward`, and registers hooks on optimizers that change its weight."""
        from tightfit.techniques.loss_head.apply_chunked_loss import apply_chunked_loss

        apply_chunked_loss(session, chosen)
