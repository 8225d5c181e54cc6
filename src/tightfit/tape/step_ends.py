"""Where a step of a program ends, told from how often its optimizers have stepped so far. One rule for traces and for recordings as they go on."""

from collections.abc import Collection

# A loop that steps one optimizer several times for each step of another one (a critic, gradient accumulation by
# two optimizers) is within this; an optimizer that is further behind has stopped, or never steps.
MAX_STEPS_OF_ONE_OPTIMIZER = 8


def ends_step(counts: Collection[int], own: int, num_ended: int) -> bool:
    """Whether a step of the program ends as an optimizer steps for the `own`-th time: with the optimizer that steps least often.

    `counts` are the steps of all optimizers, this one included, 0 for those that have not stepped yet and are waited for; `num_ended` the steps of
    the program that have ended.
    """
    most = max(counts)
    if not all(counts) and most < MAX_STEPS_OF_ONE_OPTIMIZER:
        return False
    # An optimizer that is so far behind has done its part, such as that of a first stage.
    least = min(count for count in counts if count > most - MAX_STEPS_OF_ONE_OPTIMIZER)
    return own == least > num_ended
