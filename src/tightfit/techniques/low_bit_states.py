"""An optimizer's states in 8 or 4 bits between its steps; see `tightfit.techniques.state_codecs` for the form and its sources.

Nothing has to be installed for it: the codes are made with operators of torch.
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
from tightfit.techniques.state_codecs import BlockCodec
from tightfit.techniques.technique import AbstractTechnique, Choice

# Bytes per number: of 8 bits with a scale for 256 numbers, and of 4 bits with one for 128.
_BYTES_KEPT = {8: 1 + 4 / 256, 4: 0.5 + 4 / 128}
# Codes are read, looked up and scaled; then absolute values, their maxima, quotients and codes are written and read again.
_BYTES_PER_NUMBER = 56
_KERNELS_PER_STATE = 18


@final
class LowBitStates(AbstractTechnique):
    """Trades the last bits of an optimizer's averages, and time to code them, for three or seven eighths of their bytes."""

    name = "low_bit_states"
    exact = False
    exactness = "lossy: averages of gradients and of their squares are rounded to 8 or 4 bits after each step; the update itself is in float32"
    tolerance = 0.15

    def options(self, tape: Tape, device: Device) -> Iterable[Option]:
        """Two, 8 and 4 bits, for an optimizer with averages."""
        run = OptimizerTape(tape, device)
        if not run.stretches or run.family == "adagrad" or not len(run.state(run.stretches[-1])):
            return []
        seconds = state_seconds(run, bytes_per_number=_BYTES_PER_NUMBER, kernels_per_state=_KERNELS_PER_STATE)
        return [
            Option(
                technique=self.name,
                where="optimizer",
                settings={"bits": bits},
                changes=state_changes(run, kept),
                seconds=seconds,
                exact=self.exact,
                slots=frozenset({"optimizer"}),
            )
            for bits, kept in _BYTES_KEPT.items()
        ]

    def apply(self, session: Session, chosen: Sequence[Choice]) -> None:
        """Takes over the optimizers' steps."""
        (choice,) = chosen
        encode_states(session, BlockCodec(4 if int(choice.settings["bits"]) == 4 else 8), self.name)
