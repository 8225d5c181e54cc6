"""Builds of torch for CUDA: DistributedDataParallel's reducer takes the times of its first iterations with events of a card, and there is none.

It times its first ten iterations, and then one in so many (`should_collect_runtime_stats` in torch/csrc/distributed/c10d/reducer.cpp), for a log that nobody
reads here. A build for the CPU has no such timer.
"""

from typing import Any

import torch.distributed as dist

from tightfit.capture.replace import replace
from tightfit.errors import CaptureError

_NUM_TIMED = 10
_NEVER = 2**31 - 1
# What CUDA says without a driver, and beside a card that is hidden from it.
_NO_CARD = ("CUDA driver version is insufficient", "no CUDA-capable device", "Found no NVIDIA driver")


def install() -> None:
    """Has the iterations that are timed counted as over where no card can time them."""
    prepare, make_static = dist.Reducer.prepare_for_forward, dist.Reducer._set_static_graph
    static: list[bool] = []

    def prepared(reducer: Any) -> None:
        try:
            prepare(reducer)
        except RuntimeError as error:
            if not any(words in str(error) for words in _NO_CARD):
                raise
            if static:
                raise CaptureError(
                    "DistributedDataParallel(static_graph=True) asks the card for times in its first iteration, which this build of torch cannot be kept from: "
                    "leave static_graph out, at least while it is traced, or trace with a build for the CPU"
                ) from error
            reducer._set_ddp_runtime_logging_sample_rate(_NEVER)
            for _ in range(_NUM_TIMED):
                _count(prepare, reducer)

    def made_static(reducer: Any) -> None:
        static.append(True)
        make_static(reducer)

    replace(dist.Reducer, prepare_for_forward=prepared, _set_static_graph=made_static)


def _count(prepare: Any, reducer: Any) -> None:
    """The reducer counts an iteration before it takes its time."""
    try:
        prepare(reducer)
    except RuntimeError as error:
        if not any(words in str(error) for words in _NO_CARD):
            raise
