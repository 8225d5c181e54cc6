"""CUDA graphs: a capture runs its operators eagerly. A replay launches kernels and allocates nothing, so it does nothing here."""

import contextlib
from types import TracebackType
from typing import Any, Self

import torch

from tightfit.capture.observe.streams import VirtualStream
from tightfit.capture.replace import replace


class VirtualGraph:
    """Answers to `torch.cuda.CUDAGraph`."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.keep_graph = keep_graph

    def capture_begin(self, *_args: Any, **_kwargs: Any) -> None:
        """Begins to capture: the kernels that follow are run."""

    def capture_end(self) -> None:
        """Ends the capture."""

    def instantiate(self) -> None:
        """Makes the graph ready."""

    def replay(self) -> None:
        """Launches the captured kernels again, on the same memory."""

    def reset(self) -> None:
        """Frees the graph."""

    def pool(self) -> tuple[int, int]:
        """The id of the graph's memory pool."""
        return (0, 1)


class VirtualCapture(contextlib.AbstractContextManager["VirtualCapture"]):
    """Answers to `torch.cuda.graph`, a context on a side stream."""

    def __init__(self, cuda_graph: VirtualGraph, pool: Any = None, stream: Any = None, **_kwargs: Any) -> None:
        # torch captures on a side stream, since the legacy default stream cannot be captured: its blocks come
        # from that stream's pools.
        self._stream = stream or VirtualStream()

    def __enter__(self) -> Self:
        self._stream.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stream.__exit__(kind, value, traceback)


def install() -> None:
    """Replaces torch's classes and functions."""
    answers: dict[str, Any] = {
        "CUDAGraph": VirtualGraph,
        "graph": VirtualCapture,
        "graph_pool_handle": lambda: (0, 1),
        "make_graphed_callables": lambda callables, *_args, **_kwargs: callables,
    }
    replace(torch.cuda, **answers)
    replace(torch.cuda.graphs, **answers)
