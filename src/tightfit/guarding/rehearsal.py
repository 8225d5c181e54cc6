"""Rehearses a step: runs its forward and backward pass, up to its first update, and takes all of it back."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from tightfit.errors import ApplyError
from tightfit.guarding.attempts import Attempts
from tightfit.guarding.memory.out_of_memory import without_frames
from tightfit.guarding.memory.retried_updates import UpdateReached


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What a rehearsal with the largest batch has shown.

    `shapes` are those of the batch, the largest of `num_seen` of `num_examples` examples; `plan` is the position in the ladder of the plan with which its
    forward and backward pass had room, -1 for none. `why_not` is why nothing was tried; empty where something was.
    """

    shapes: str = ""
    num_seen: int = 0
    num_examples: int = 0
    plan: int = -1
    why_not: str = ""


def rehearse_step(
    attempts: Attempts, call: Callable[[], object], reached: Mapping[str, Any], *, names_data: Callable[[], bool]
) -> int:
    """The position of the plan with which the step of `call` has room up to its first update; -1 for none. The plan before is put on again.

    Raises:
        torch.OutOfMemoryError: it has none with any plan.
        ApplyError: what it has changed cannot be taken back.
    """
    tried: list[str] = []
    while True:
        attempt = attempts.begin(reached, names_data=names_data)
        failure: BaseException | None = None
        try:
            with attempts.updates.up_to_updates():
                call()
        except UpdateReached:
            pass
        except (RuntimeError, MemoryError, ApplyError) as error:
            if not attempts.are_taken_back_after(error):
                raise
            failure = without_frames(error)
        finally:
            attempts.leave(attempt)
        if failure is None:
            if why_not := attempts.undo(attempt):
                raise ApplyError(
                    f"the largest batch was tried, and {why_not}: what that has changed cannot be taken back; start again without it"
                )
            found = attempts.rungs.at
            attempts.rungs.to_the_top()
            return found
        attempts.take_back(attempt, failure, tried)
        del attempt
