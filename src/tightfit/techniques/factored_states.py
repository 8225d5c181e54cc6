"""The squares that an optimizer averages, as the means of their rows and columns: Shazeer and Stern, "Adafactor" (arXiv:1804.04235).

Only the form of the second moment is Adafactor's; the update is the script's own optimizer's, which sees `rows x columns / mean` in place of it.
"""

from collections.abc import Iterable, Sequence
from typing import final

from tightfit.devices.device import Device
from tightfit.planner.option import Option
from tightfit.tape import Tape
from tightfit.techniques.encoded_numbers import state_changes, state_seconds
from tightfit.techniques.encoded_states import encode_states
from tightfit.techniques.optimizer_tape import OptimizerTape
from tightfit.techniques.session import Session
from tightfit.techniques.state_codecs import FactoredCodec
from tightfit.techniques.technique import AbstractTechnique, Choice

_PART_OF_ADAM = 0.5  # one of its two states is an average of squares
_BYTES_PER_NUMBER = 12  # of Adam's two states one is read twice and written once
_KERNELS_PER_STATE = 4


@final
class FactoredStates(AbstractTechnique):
    """Trades the single entries of Adam's second moment for nearly all of its bytes."""

    name = "factored_states"
    exact = False
    exactness = "lossy: of the averages of squared gradients only the means of rows and columns are kept; vectors keep theirs whole"
    tolerance = 0.15

    def options(self, tape: Tape, device: Device) -> Iterable[Option]:
        """One for Adam and AdamW."""
        run = OptimizerTape(tape, device)
        if not run.stretches or run.family != "adam":
            return []
        return [
            Option(
                technique=self.name,
                where="optimizer",
                changes=state_changes(run, 0.0, part=_PART_OF_ADAM),
                seconds=state_seconds(run, bytes_per_number=_BYTES_PER_NUMBER, kernels_per_state=_KERNELS_PER_STATE),
                exact=self.exact,
                slots=frozenset({"optimizer"}),
            )
        ]

    def apply(self, session: Session, chosen: Sequence[Choice]) -> None:
        """Takes over the optimizers' steps."""
        encode_states(session, FactoredCodec(), self.name)
