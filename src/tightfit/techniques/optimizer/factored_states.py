"""Factored second moments: averages of squared gradients kept as row and column means; Shazeer and Stern, "Adafactor" (arXiv:1804.04235).

Only the form of the second moment is Adafactor's; the update is the script's own optimizer's, which sees `rows x columns / mean` instead.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, final

from tightfit.analysis.gradient_readers import updates_in_backward
from tightfit.analysis.optimizer_algorithm import family_of
from tightfit.analysis.profile import Profile
from tightfit.planner.option import Option
from tightfit.techniques.optimizer.states.quantized_state_options import Coding, coded_options
from tightfit.techniques.technique import AbstractTechnique, ChosenOption, Needs

if TYPE_CHECKING:
    from tightfit.techniques.session import Session

# One of Adam's two states is an average of squares. It is read for the means of its rows and of its columns, and written again; the product
# of a row and a column is in float32 first. Rows and columns themselves are next to nothing.
_CODING = Coding(bytes_kept=0.0, part=0.5, bytes_moved=8, num_passes=3, kernels_per_piece=7, bytes_between=4)


@final
class FactoredStates(AbstractTechnique):
    """Trades the individual entries of Adam's second moment for nearly all of its bytes."""

    name = "factored_states"
    exact = False
    needs = Needs.STEPS
    exactness = (
        "lossy: averages of squared gradients are reduced to the means of rows and columns; vectors keep theirs whole"
    )
    tolerance = 0.15
    is_alike_in_batches = True

    def options(self, profile: Profile) -> Iterable[Option]:
        """For Adam and AdamW, with and without updates in the backward pass."""
        run = profile.optimizer
        if not run.step_ranges or updates_in_backward(run) or family_of(run) != "adam":
            return []
        return coded_options(run, _CODING, technique=self.name)

    def apply(self, session: "Session", chosen: Sequence[ChosenOption]) -> None:
        """Replaces the optimizers' steps."""
        from tightfit.techniques.optimizer.apply_factored_states import apply_factored_states

        apply_factored_states(session, chosen)
