"""Puts `update_in_backward` on live objects: see `tightfit.techniques.optimizer.update_in_backward` for what it is and where it comes from."""

from collections.abc import Sequence

from tightfit.techniques.optimizer.updates.backward_updates import Updates
from tightfit.techniques.optimizer.updates.optimizer_kernels import check_kernel, set_kernels
from tightfit.techniques.optimizer.updates.optimizer_steps import check_separable, update_alone
from tightfit.techniques.optimizer.updates.update_settings import UpdateSettings
from tightfit.techniques.session import Session
from tightfit.techniques.technique import ChosenOption, the_only

_NAME = "update_in_backward"


def apply_update_in_backward(session: Session, chosen: Sequence[ChosenOption]) -> None:
    """Takes over the gradients of every parameter of the session's optimizers."""
    choice = the_only(chosen)
    settings = UpdateSettings.of(choice.settings, in_backward=True)
    for optimizer in session.optimizers:
        check_separable(optimizer, _NAME)
        if settings.kernel == "fused":
            check_kernel(optimizer, session.model, "fused", "update_in_backward")
    if settings.kernel == "fused":
        set_kernels(session, session.optimizers, "fused")
    updates = {optimizer: update_alone(optimizer) for optimizer in session.optimizers}
    Updates(session, updates).install()
