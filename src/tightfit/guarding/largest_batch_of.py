"""Looks for the largest batch of a data loader in a forked process: whatever its examples draw, count or keep there, this process does not see.

As with a worker of a loader, files that they write are written.
"""

import io
import multiprocessing
import os
import sys
import time
import warnings
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.utils.data import DataLoader

from tightfit.capture.patches.loading.largest_batches import (
    MAX_SECONDS,
    LargestBatch,
    can_be_looked_through,
    largest_batch,
    sizes_of_examples,
)

# For what cannot be bounded from within: one example, or asking a sampler for its batches.
_SECONDS_TO_GIVE_UP = 6 * MAX_SECONDS


def largest_batch_of(loader: DataLoader[Any]) -> LargestBatch | str:
    """The largest batch, or why it is not known."""
    if not can_be_looked_through(loader):
        return "its examples have no numbers, or no sampler makes batches of them"
    if sys.platform != "linux":
        return "this system cannot look at a data set in a process of its own"
    context = multiprocessing.get_context("fork")
    receives, sends = context.Pipe(duplex=False)
    with warnings.catch_warnings():
        # Threads of this process are not in the other one, and it computes with one.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = context.Process(target=_look, args=(loader, sends), daemon=True)
        child.start()
    sends.close()
    end = time.monotonic() + _SECONDS_TO_GIVE_UP
    try:
        if not receives.poll(max(0.0, end - time.monotonic())):
            return f"looking for it took more than {_SECONDS_TO_GIVE_UP:.0f} s"
        # From a process of our own.
        found: LargestBatch | str | None = torch.load(io.BytesIO(receives.recv_bytes()), weights_only=False)
    except EOFError:
        return "the process that looked for it has died"
    finally:
        child.kill()
        child.join()
        receives.close()
    return "it has no batch" if found is None else found


def _look(loader: DataLoader[Any], sends: Connection) -> None:
    # What an example prints is not to be seen twice.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    # As in a worker of a loader: the threads of the other process are not here.
    torch.set_num_threads(1)
    try:
        found: LargestBatch | str | None = largest_batch(loader, sizes_of_examples(loader.dataset))
    except Exception as error:  # noqa: BLE001 - whatever a data set raises is the answer
        found = f"an example could not be read: {type(error).__name__}: {error}"
    written = io.BytesIO()
    try:
        torch.save(found, written)
    except Exception as error:  # noqa: BLE001 - a batch may hold anything
        written = io.BytesIO()
        torch.save(f"the batch cannot be handed over: {type(error).__name__}: {error}", written)
    sends.send_bytes(written.getvalue())
