"""What the whole batch decides, where its parts decide otherwise: a batch with padding has a part without any, whose code leaves the mask out.

The plain run goes by the whole. So its decisions are taken from a run of the whole, which ends at the one that parts differ in, and each part is led by
them: code that asks gets the answer of the whole. That parts which go that way keep their rows apart is proved as for any other way.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tightfit.effects.reads import Reads
from tightfit.effects.values.fingerprints import paused
from tightfit.techniques.micro_batches.batches import AbstractBatch
from tightfit.techniques.micro_batches.loss_means import DecidedEnough, Decision, LossWatch


class DecidesOtherwise(Exception):
    """One part has decided otherwise than another, whose decisions are these: `number` is that of the first one in which they differ."""

    def __init__(self, one: Sequence[Any], other: Sequence[Any]) -> None:
        super().__init__()
        self.decisions = one
        pairs = enumerate(zip(one, other, strict=False))
        self.number = next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def decisions_of_whole(
    forward: Callable[..., Any],
    batch: AbstractBatch,
    number: int,
    *,
    unseen: Callable[[], contextlib.AbstractContextManager[Any]],
) -> tuple[Decision, ...] | None:
    """The decisions of the whole batch up to `number`; None where it has none of that number, or one that is no number.

    Masks are made before anything large is computed, so most of the forward does not run. It does so with gradients: code may ask for these before it decides.
    """
    args, kwargs = batch.part(0, batch.num_examples)
    watch = LossWatch(batch.num_examples, allows_randomness=False, num_wanted=number + 1)
    try:
        with unseen(), paused(), watch:
            forward(*args, **kwargs)
    except DecidedEnough:
        pass
    except Exception:  # noqa: BLE001 - parts are refused for it, and the program has its own without them
        return None
    found = watch.known_decisions()
    return found if len(found) == number + 1 else None


def values_read(
    forward: Callable[..., Any],
    batch: AbstractBatch,
    part: tuple[int, int],
    led: Sequence[Decision],
    *,
    unseen: Callable[[], contextlib.AbstractContextManager[Any]],
) -> list[Any]:
    """The values that the model reads from its tensors for a part, but the decisions that it is led by."""

    def read() -> list[Any]:
        args, kwargs = batch.part(*part)
        watch = LossWatch(part[1] - part[0], allows_randomness=True, led=led)
        with unseen(), paused(), watch, Reads() as reads:
            forward(*args, **kwargs)
        return reads.values

    try:
        with torch.no_grad():
            return read()
    except RuntimeError:
        # A model that differentiates itself (forces are the slopes of energies) needs a graph.
        return read()
