"""Records what CUDA kernels and libraries allocate besides the outputs of an operator.

Scratch memory is freed within the operator. A library's workspace is retained: one per library handle, which belongs to a host thread, and stream.
"""

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from tightfit.capture.kernels.architecture import Card
from tightfit.capture.kernels.library_workspaces import PRODUCTS, workspaces
from tightfit.capture.kernels.rule import Uncertain
from tightfit.capture.kernels.scratch import SCRATCH, scratch_events
from tightfit.capture.kernels.tf32 import convolves_in_tf32
from tightfit.capture.observe.recorder import Recorder
from tightfit.tape import Category, Source

_SOURCES = {"cublas": Source.CUBLAS, "cublaslt": Source.CUBLASLT}


def _settings() -> tuple[bool, ...]:
    """What scratch memory depends on besides the card and the call (`tightfit.capture.kernels`)."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        convolves_in_tf32(),
    )


class KernelMemory:
    """Adds scratch memory and workspaces to the record of the operator that has just run."""

    def __init__(self, recorder: Recorder, card: Card) -> None:
        self._recorder = recorder
        self._card = card
        self._kept: set[tuple[str, int, int]] = set()
        # The library handles of threads, by number, and those that threads which have ended left in the pool, the last one on top.
        self._handles: dict[int, int] = {}
        self._pool: list[int] = []
        # By address, as torch hashes operators in Python; with each operator, whether it is a product and whether its kernel asks for memory.
        self._uses: dict[int, tuple[OpOverload, bool, bool]] = {}

    def add(
        self,
        operator: OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        outputs: Any,
        remembered: dict[Any, tuple[int, ...]] | None = None,
    ) -> None:
        """Called when the operator's outputs have been allocated. `remembered` has the requests of earlier calls on tensors like these, by `_settings`."""
        uses = self._uses.get(id(operator))
        if uses is None:
            uses = self._uses[id(operator)] = (operator, operator in PRODUCTS, operator in SCRATCH)
        _, is_product, has_scratch = uses
        if is_product:
            self._add_workspaces(operator, args, kwargs)
        if not has_scratch:
            return
        settings = _settings()
        events = None if remembered is None else remembered.get(settings)
        if events is None:
            events = scratch_events(operator, args, kwargs, outputs, self._card)
            if remembered is not None:
                remembered[settings] = events
        if events:
            self._run_scratch(events)

    def _add_workspaces(self, operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        recorder = self._recorder
        for workspace in workspaces(operator, args, kwargs, card=self._card, environ=os.environ):
            # PyTorch keeps workspaces by (handle, stream), and pools handles by thread
            # (aten/src/ATen/cuda/CublasHandlePool.cpp). Autograd's thread here is torch's own, so its identity
            # is the true one.
            key = (workspace.kind, self._handle(), recorder.stream)
            if key not in self._kept:
                self._kept.add(key)
                recorder.allocate(workspace.num_bytes, Category.WORKSPACE, _SOURCES[workspace.kind])

    def _handle(self) -> int:
        thread = threading.get_ident()
        if thread not in self._handles:
            self._handles[thread] = self._pool.pop() if self._pool else len(self._handles)
        return self._handles[thread]

    def thread_ends(self) -> None:
        """The thread that calls gives its handles back to the pool, as its thread-locals do at its end (aten/src/ATen/cuda/detail/DeviceThreadHandles.h)."""
        handle = self._handles.pop(threading.get_ident(), None)
        if handle is not None:
            self._pool.append(handle)

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
