"""Records what CUDA kernels and libraries allocate besides the outputs of an operator.

Scratch memory is freed within the operator. A library's workspace is retained: one per library handle, which belongs to a host thread, and stream.
"""

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from torch._ops import OpOverload

from tightfit.capture.kernels.architecture import Card
from tightfit.capture.kernels.library_workspaces import workspaces
from tightfit.capture.kernels.rule import Uncertain
from tightfit.capture.kernels.scratch import scratch_events
from tightfit.capture.observe.recorder import Recorder
from tightfit.tape import Category, Source

_SOURCES = {"cublas": Source.CUBLAS, "cublaslt": Source.CUBLASLT}


class KernelMemory:
    """Adds scratch memory and workspaces to the record of the operator that has just run."""

    def __init__(self, recorder: Recorder, card: Card) -> None:
        self._recorder = recorder
        self._card = card
        self._kept: set[tuple[str, int, int]] = set()

    def add(self, operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> None:
        """Called when the operator's outputs have been allocated."""
        recorder = self._recorder
        for workspace in workspaces(operator, args, kwargs, card=self._card, environ=os.environ):
            # PyTorch keeps workspaces by (handle, stream), and pools handles by thread
            # (aten/src/ATen/cuda/CublasHandlePool.cpp). Autograd's thread here is torch's own, so its identity
            # is the true one.
            key = (workspace.kind, threading.get_ident(), recorder.stream)
            if key not in self._kept:
                self._kept.add(key)
                recorder.allocate(workspace.num_bytes, Category.WORKSPACE, _SOURCES[workspace.kind])
        events = scratch_events(operator, args, kwargs, outputs, self._card)
        if events:
            self._run_scratch(events)

    def _run_scratch(self, events: Sequence[int]) -> None:
        blocks: list[int] = []
        alive: list[int] = []
        for event in events:
            if event >= 0:
                blocks.append(self._allocate(event))
                alive.append(blocks[-1])
            else:
                alive.remove(blocks[-event - 1])
                self._recorder.free(blocks[-event - 1])
        for block in reversed(alive):
            self._recorder.free(block)

    def _allocate(self, num_bytes: int) -> int:
        if isinstance(num_bytes, Uncertain):
            size_range = (num_bytes.low_bytes, num_bytes.high_bytes)
            return self._recorder.allocate(int(num_bytes), Category.WORKSPACE, Source.CUDNN, size_range)
        return self._recorder.allocate(num_bytes, Category.TEMPORARIES, Source.SCRATCH)
