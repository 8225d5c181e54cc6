"""Fresh processes that start with torch loaded: a server imports it once and forks for each, before anything has used the GPU.

Where the server's imports have initialised CUDA, which a fork does not survive, processes are spawned instead, at some seconds each.
"""

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import Any

from benchmarks.gpu import measure

_PRELOADED = ["torch", "benchmarks.gpu.measure"]
_ON_TRANSFORMERS = "benchmarks.gpu.tokens"
_GRACE_SECONDS = 10
_START_SECONDS = 120
# The messages of CUDA and torch in a process that was forked after CUDA was initialised.
_AFTER_A_FORK = ("initialization error", "re-initialize CUDA", "not initialized")


class Processes:
    """Runs one piece of work at a time, each in a process of its own."""

    def __init__(self, kind: str = "forkserver", *, with_transformers: bool) -> None:
        # Without this torch asks the CUDA runtime whether there is a card, which initialises it.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        self._context: BaseContext = multiprocessing.get_context(kind)
        if kind == "forkserver":
            preloaded = [*_PRELOADED, *([_ON_TRANSFORMERS] if with_transformers else [])]
            self._context.set_forkserver_preload(preloaded)  # type: ignore[attr-defined]

    def run(self, work: Callable[..., Any], timeout_seconds: float, **arguments: Any) -> dict[str, Any]:
        """`{"ok": what work returned}` or `{"fault": a line}`, with `"seconds"`."""
        begin = time.perf_counter()
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=measure.answer, args=(work, theirs, arguments))  # type: ignore[attr-defined]
        process.start()
        theirs.close()
        try:
            found = ours.recv() if ours.poll(timeout_seconds) else {"fault": f"not done in {timeout_seconds:.0f} s"}
        except EOFError:
            process.join(_GRACE_SECONDS)
            found = {"fault": f"the process died with exit code {process.exitcode}"}
        if process.is_alive():
            process.join(_GRACE_SECONDS if "ok" in found else 0)
        if process.is_alive():
            process.kill()
        process.join()
        return found | {"seconds": round(time.perf_counter() - begin, 2)}


def started(*, virtual: bool, with_transformers: bool) -> tuple[Processes, dict[str, Any]]:
    """Processes that can use the GPU, and its description; for the virtual GPU there is none to query.

    Raises:
        RuntimeError: no process finds a card; the message is torch's.
    """
    forked = Processes(with_transformers=with_transformers)
    if virtual:
        return forked, {}
    found = forked.run(measure.card_here, _START_SECONDS)
    if "ok" in found:
        return forked, found["ok"]
    if any(word in found["fault"] for word in _AFTER_A_FORK):
        spawned = Processes("spawn", with_transformers=with_transformers)
        found = spawned.run(measure.card_here, _START_SECONDS)
        if "ok" in found:
            return spawned, found["ok"]
    raise RuntimeError(found["fault"])
