"""Puts `factored_states` on live objects: see `tightfit.techniques.optimizer.factored_states` for what it is and where it comes from."""

from collections.abc import Sequence

from tightfit.techniques.optimizer.states.quantized_states import encode_states
from tightfit.techniques.optimizer.states.state_codecs import FactoredCodec
from tightfit.techniques.session import Session
from tightfit.techniques.technique import ChosenOption, the_only

_NAME = "factored_states"


def apply_factored_states(session: Session, chosen: Sequence[ChosenOption]) -> None:
    """Replaces the optimizers' steps."""
    choice = the_only(chosen)
    encode_states(session, FactoredCodec(), _NAME, choice.settings)
