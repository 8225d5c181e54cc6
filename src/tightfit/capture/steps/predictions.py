"""When a script that only predicts is left: each call that is unlike those before is traced, and a loop that makes token after token may go on for many thousands of them."""

import ast
from collections.abc import Iterable

from tightfit.capture.after_steps.fast_forward import FastForward

MAX_WITH_GRADIENTS = (64, 60_000)
"""A script that only predicts, with gradients enabled, is left after more than so many calls of a model and operators: each call is traced, as what it holds for
a backward pass is freed where the program drops it."""
MAX_WITHOUT_GRADIENTS = (64, 120_000)
"""Those without gradients; calls that repeat earlier ones have no operators. A trace takes some 40 s for so many."""

_TRAINS = frozenset({"backward", "fit", "training_step", "Trainer", "Seq2SeqTrainer", "SFTTrainer"})


def is_long(
    after: FastForward, num_calls: int, num_operators: int, *, with_gradients: bool, was_to_train: bool
) -> bool:
    """Whether a trace that goes on `after` is to end with this call. `was_to_train`: the program had an optimizer."""
    if after.follows is not None and after.follows.last_call:
        # Techniques add operators: the traces with and without them are to end at the same call.
        return after.follows.last_call == num_calls
    max_calls, max_operators = MAX_WITH_GRADIENTS if with_gradients else MAX_WITHOUT_GRADIENTS
    if num_calls <= max_calls or num_operators <= max_operators:
        return False
    # An evaluation before training is no end.
    return with_gradients or not (was_to_train or _may_train(after.program.trees.values()))


def _may_train(trees: Iterable[ast.Module]) -> bool:
    """Whether a program with these files may come to train after what it has done so far."""
    for tree in trees:
        for node in ast.walk(tree):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if name in _TRAINS or (isinstance(node, ast.FunctionDef) and node.name in _TRAINS):
                return True
    return False
