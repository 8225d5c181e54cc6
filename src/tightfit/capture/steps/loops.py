"""Detects whose training loop runs, the program's own or a framework's, from the call stack of a backward pass.

A framework that computes the loss of a batch in one method and runs the backward pass itself allows a plan to split that method into
micro-batches, also if the model returns no loss. Lightning's manual optimization calls `backward` in the user's own step, and counts as a
loop of the program's own.
"""

from types import FrameType

_AUTOMATIC = "loops.optimization.automatic"
_STEPS = {
    ("lightning.pytorch." + _AUTOMATIC, "closure"): "Lightning",
    ("pytorch_lightning." + _AUTOMATIC, "closure"): "Lightning",
    ("transformers.trainer", "training_step"): "Trainer",
}


def loop_around(frame: FrameType | None) -> str:
    """The framework whose step `frame` is called from, "Lightning" or "Trainer"; empty for the program's own."""
    while frame is not None:
        found = _STEPS.get((frame.f_globals.get("__name__", ""), frame.f_code.co_name))
        if found:
            return found
        frame = frame.f_back
    return ""
