"""`torch.multiprocessing.spawn` with a process for each GPU of the machine: the traced one is run in place, the others not at all."""

from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing

from tightfit.capture.observe.attribution import user_line
from tightfit.capture.replace import replace
from tightfit.errors import CaptureError
from tightfit.errors.faults import hands_over


class _Joined:
    """What `spawn(..., join=False)` returns: processes that have ended."""

    processes: tuple[()] = ()

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """All of them have ended."""
        return True


def install(num_gpus: int, local_rank: int) -> None:
    """Replaces torch's function; `num_gpus` are simulated on each machine, and `local_rank` is the traced one."""

    @hands_over
    def spawn(
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        nprocs: int = 1,
        join: bool = True,
        daemon: bool = False,
        start_method: str = "spawn",
    ) -> _Joined | None:
        if nprocs != num_gpus:
            raise CaptureError(
                f"{user_line()} spawns {nprocs} processes, but {num_gpus} {'GPU is' if num_gpus == 1 else 'GPUs are'} simulated on each machine; estimate it with --gpus {nprocs}"
            )
        fn(local_rank, *args)
        return None if join else _Joined()

    replace(torch.multiprocessing, spawn=spawn)
