"""Whether this process is traced on a virtual GPU, whose tensors have no values: then nothing can be compared by value.

Or whether it proves a plan by values, on a machine that need not be the one that the plan is for; and whether what was put on a model in it tells micro-batches apart.
"""

_state = {"is_on": False, "is_proof": False, "is_any_batch_alone": False}


def begin_trace() -> None:
    """To be called by the process that is about to be traced."""
    _state["is_on"] = True


def is_simulated() -> bool:
    """Whether tensors on the GPU have no values here."""
    return _state["is_on"]


def begin_proof() -> None:
    """To be called by the process that is about to prove a plan."""
    _state["is_proof"] = True


def is_proof() -> bool:
    """Whether what this machine lacks says nothing of the plan."""
    return _state["is_proof"]


def begin_plan(*, is_alike: bool = False) -> None:
    """To be called where techniques, or a guard, are about to be put on a model; `is_alike`: what they do in a micro-batch does not depend on others."""
    _state["is_any_batch_alone"] |= not is_alike


def does_batches_alone() -> bool:
    """Whether something was put on a model that may do in a micro-batch what depends on those before and behind it."""
    return _state["is_any_batch_alone"]
