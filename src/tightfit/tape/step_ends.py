"""Where a step of a program ends, by its optimizers: with the one that steps least often, among those that take part in it.

Optimizers that have stopped, such as that of a first stage, take no part. A run that is over shows which those are (`ends_of_run`); while a trace or a
recording goes on, an optimizer has stopped where it is far behind the others (`ends_step`). Both say the same of a loop that steps all of them in turn.
"""

from collections.abc import Collection, Hashable, Sequence

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


def ends_of_run(steppers: Sequence[Hashable]) -> list[int]:
    """The positions at which steps of the program end, in a run that is over; `steppers` are the optimizers in the order in which they stepped.

    Optimizers that run one after the other are stages, each with its own slowest.
    """
    steps_of_each: dict[Hashable, list[int]] = {}
    for position, who in enumerate(steppers):
        steps_of_each.setdefault(who, []).append(position)
    # An optimizer that stepped once may be slow rather than late: its begin is unknown.
    begins = {who: steps[0] if len(steps) > 1 else 0 for who, steps in steps_of_each.items()}
    stages: list[list[list[int]]] = []
    reach = -1
    for who in sorted(steps_of_each, key=begins.__getitem__):
        if begins[who] > reach:
            stages.append([])
        stages[-1].append(steps_of_each[who])
        reach = max(reach, steps_of_each[who][-1])
    # Of two that step equally often, the later one ends the step.
    slowest = [min(stage, key=lambda steps: (len(steps), -steps[-1])) for stage in stages]
    return [position for steps in slowest for position in steps]
