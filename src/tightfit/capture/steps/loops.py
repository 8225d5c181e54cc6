"""Whose loop trains: the program's own, or that of a framework, which shows in the functions that a backward pass is run from.

A framework that computes the loss of a batch in one method, and runs it backwards itself, lets a plan put that method in parts, also where the
model returns no loss. Lightning's manual optimization runs backwards inside of the user's own step, and is a loop of the program's own.
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
