"""Puts `low_bit_states` on live objects: see `tightfit.techniques.optimizer.low_bit_states` for what it is and where it comes from."""

from collections.abc import Sequence

from tightfit.techniques.optimizer.states.bitsandbytes_codec import BitsandbytesCodec
from tightfit.techniques.optimizer.states.kernel_codec import KernelCodec
from tightfit.techniques.optimizer.states.quantized_states import encode_states
from tightfit.techniques.optimizer.states.state_codecs import AbstractCodec, BlockCodec
from tightfit.techniques.optimizer.states.state_sizes import Bits
from tightfit.techniques.session import Session
from tightfit.techniques.technique import ChosenOption, the_only

_NAME = "low_bit_states"


def apply_low_bit_states(session: Session, chosen: Sequence[ChosenOption]) -> None:
    """Replaces the optimizers' steps."""
    choice = the_only(chosen)
    encode_states(session, _codec(session, choice), _NAME, choice.settings)


def _codec(session: Session, choice: ChosenOption) -> AbstractCodec:
    if choice.settings.get("library"):
        return BitsandbytesCodec(next(session.model.parameters()))
    bits: Bits = 4 if int(choice.settings["bits"]) == 4 else 8
    if choice.settings.get("compiled"):
        return KernelCodec(bits, next(session.model.parameters()), session.notes.append)
    return BlockCodec(bits)
