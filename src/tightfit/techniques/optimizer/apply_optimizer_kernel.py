"""Puts `optimizer_kernel` on live objects: see `tightfit.techniques.optimizer.optimizer_kernel` for what it is and where it comes from."""

from collections.abc import Sequence

from tightfit.techniques.optimizer.updates.optimizer_kernels import Kernel, check_kernel, set_kernels
from tightfit.techniques.session import Session
from tightfit.techniques.technique import ChosenOption, the_only


def apply_optimizer_kernel(session: Session, chosen: Sequence[ChosenOption]) -> None:
    """Sets the flags of every optimizer's groups."""
    choice = the_only(chosen)
    kernel: Kernel = choice.settings["kernel"]
    for optimizer in session.optimizers:
        check_kernel(optimizer, session.model, kernel)
    set_kernels(session, session.optimizers, kernel)
