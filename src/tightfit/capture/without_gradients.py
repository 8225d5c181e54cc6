"""Programs that predict with gradients enabled: what they would hold without, from a trace of their own."""

import dataclasses
from collections.abc import Callable

from tightfit.capture.trace import Preparation, Traced
from tightfit.errors import TightfitError
from tightfit.tape import Assumption, Tape
from tightfit.tape.allocated_bytes import allocated_bytes
from tightfit.units import format_bytes

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


def with_gradients_noted(traced: Traced, trace_again: Callable[[Preparation], Traced]) -> Traced:
    """The trace that also says what gradients cost a program that only predicts."""
    if not traced.predicts_with_gradients:
        return traced
    saved = saved_without_gradients(traced.tape, trace_again)
    why = "models are called with gradients enabled, and no gradient is computed: what a backward pass would need is held; "
    if saved is None:
        why += "call them within `torch.no_grad()` or `torch.inference_mode()`"
    else:
        peak = int(allocated_bytes(traced.tape).max())
        why += f"within `torch.no_grad()` or `torch.inference_mode()` the peak of allocated memory would be {format_bytes(peak - saved)}, not {format_bytes(peak)}"
    note = Assumption(where="", what=why)
    return dataclasses.replace(
        traced, tape=dataclasses.replace(traced.tape, assumptions=(note, *traced.tape.assumptions))
    )
