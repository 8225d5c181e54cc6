"""Whether this process is traced on a virtual GPU, whose tensors have no values: then nothing can be compared by value.

Or whether it proves a plan by values, on a machine that need not be the one that the plan is for; and whether a plan was put on a model in it.
"""

_state = {"is_on": False, "is_proof": False, "has_plan": False}


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


def begin_plan() -> None:
    """To be called where techniques, or a guard, are about to be put on a model."""
    _state["has_plan"] = True


def has_plan() -> bool:
    """Whether techniques were put on a model: what they do in a micro-batch may depend on those before and behind it."""
    return _state["has_plan"]
