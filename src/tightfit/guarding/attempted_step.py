"""Runs one step, a function without arguments, as often as it takes: an attempt that finds no memory is taken back before the next one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tightfit.errors import ApplyError
from tightfit.guarding.attempts import Attempts
from tightfit.guarding.memory.out_of_memory import without_frames
from tightfit.guarding.replayed_batches import ReplayedBatches

Result = TypeVar("Result")


def run_step(
    attempts: Attempts,
    call: Callable[[], Result],
    reached: Mapping[str, Any],
    *,
    names_data: Callable[[], bool],
    sources: Sequence[ReplayedBatches[Any]] = (),
    refusal: Callable[[], str] = lambda: "",
    restore: Callable[[], object] = lambda: None,
    lower: Callable[[BaseException], str] = lambda _: "",
) -> Result:
    """The result of `call`, a step that reaches these values, by name.

    `names_data`, `sources`: as in `Attempts.begin`. `refusal` says why an attempt cannot be taken back, where the caller knows; `restore` takes back
    what is not in `reached`, after all else. `lower` makes the step smaller after an error, and says how; empty where it cannot be.

    Raises:
        torch.OutOfMemoryError: the step found no memory with any plan, or could not be taken back; its notes say which. What else `call` raises is not
            touched.
    """
    attempts.num_steps += 1
    tried: list[str] = []
    while True:
        attempt = attempts.begin(reached, names_data=names_data, sources=sources)
        failure = None
        try:
            result = call()
            attempts.succeeded(attempt)
        except (RuntimeError, MemoryError, ApplyError) as error:
            if not attempts.are_taken_back_after(error):
                raise
            failure = without_frames(error)
        finally:
            attempts.leave(attempt)
        if failure is None:
            attempts.climb()
            return result
        # Outside of the handler: its frames hold the activations of the failed step.
        attempts.take_back(attempt, failure, tried, refusal=refusal, lower=lower)
        restore()
        del attempt
