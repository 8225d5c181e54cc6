"""An optimizer's states in 8 or 4 bits between its steps; see `tightfit.techniques.state_codecs` for the form and its sources.

Nothing has to be installed for it: the codes are made with operators of torch.
"""

from collections.abc import Iterable, Sequence
from typing import final

from tightfit.devices.device import Device
from tightfit.planner.option import Option
from tightfit.tape import Tape
from tightfit.techniques.encoded_numbers import Coding, coded_options
from tightfit.techniques.encoded_states import encode_states
from tightfit.techniques.optimizer_tape import OptimizerTape
from tightfit.techniques.session import Session
from tightfit.techniques.state_codecs import BLOCK_SIZE, BlockCodec
from tightfit.techniques.technique import AbstractTechnique, Choice

# Of each piece: absolute values, their maxima, quotients, codes in 32 bits and in few, written and read again; then codes in 32 bits, looked
# up, scaled, rounded. 4 bits are also packed and unpacked.
_CODINGS = {
    8: Coding(
        bytes_kept=1 + 4 / BLOCK_SIZE[8],
        bytes_moved=50,
        num_passes=2,
        kernels_per_piece=11,
        bytes_between=8,
        bytes_more_in_16_bits=4,
    ),
    4: Coding(
        bytes_kept=0.5 + 4 / BLOCK_SIZE[4],
        bytes_moved=56,
        num_passes=2,
        kernels_per_piece=16,
        bytes_between=8,
        bytes_more_in_16_bits=4,
    ),
}


@final
class LowBitStates(AbstractTechnique):
    """Trades the last bits of an optimizer's averages, and time to code them, for three or seven eighths of their bytes."""

    name = "low_bit_states"
    exact = False
    exactness = "lossy: averages of gradients and of their squares are rounded to 8 or 4 bits after each step; the update itself is in float32"
    tolerance = 0.15

    def options(self, tape: Tape, device: Device) -> Iterable[Option]:
        """8 and 4 bits, each with and without updates in the backward pass, for an optimizer with averages."""
        run = OptimizerTape(tape, device)
        if not run.stretches or run.family == "adagrad" or not len(run.state(run.stretches[-1])):
            return []
        return [
            option
            for bits, coding in _CODINGS.items()
            for option in coded_options(run, coding, technique=self.name, settings={"bits": bits})
        ]

    def apply(self, session: Session, chosen: Sequence[Choice]) -> None:
        """Takes over the optimizers' steps."""
        (choice,) = chosen
        encode_states(session, BlockCodec(4 if int(choice.settings["bits"]) == 4 else 8), self.name, choice.settings)
