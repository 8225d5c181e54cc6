"""Programs that predict with gradients enabled: what they would hold without, from a trace of their own."""

from collections.abc import Callable

from tightfit.capture.trace import Preparation, Traced
from tightfit.errors import TightfitError
from tightfit.tape import Tape
from tightfit.tape.allocated_bytes import allocated_bytes

_FUNCTION = "tightfit.capture.without_gradients:prepare"


def prepare(argument: None) -> Callable[[], None]:
    """Has the program that is traced begin as it would within `torch.no_grad()`."""
    import torch

    torch.set_grad_enabled(False)
    return lambda: None


def saved_without_gradients(tape: Tape, trace_again: Callable[[Preparation], Traced]) -> int | None:
    """By how much the allocated bytes at the peak of `tape` fall where the program computes without gradients; None where that could not be seen, as it does not run
    so, or enables them itself."""
    try:
        without = trace_again(Preparation(function=_FUNCTION, argument=None)).tape
    except TightfitError:
        return None
    saved = int(allocated_bytes(tape).max() - allocated_bytes(without).max())
    return saved if saved > 0 else None
