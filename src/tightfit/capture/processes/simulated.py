"""Whether this process is traced on a virtual GPU, whose tensors have no values: then nothing can be compared by value."""

_state = {"is_on": False}


def begin() -> None:
    """To be called by the process that is about to be traced."""
    _state["is_on"] = True


def is_simulated() -> bool:
    """Whether tensors on the GPU have no values here."""
    return _state["is_on"]
