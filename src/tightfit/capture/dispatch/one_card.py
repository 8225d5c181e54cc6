"""One card is simulated: a program that asks for a second one, or for a second process, gets an error of one line."""

import os
from typing import Any

import torch

from tightfit.capture.observe.attribution import user_line
from tightfit.capture.replace import replace
from tightfit.errors import CaptureError
from tightfit.errors.faults import hands_over


@hands_over
def check(device: Any) -> None:
    """Accepts `cuda` and `cuda:0`, in any form that a program may name them.

    Raises:
        CaptureError: it is another card.
    """
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        index = device.index if device.type == "cuda" else None
    else:
        index = device if isinstance(device, int) else None
    if index is not None and index > 0:
        raise CaptureError(
            f"{user_line()} uses cuda:{index}, but one GPU is simulated, cuda:0; estimate the work of one GPU"
        )


def install() -> None:
    """Patches `scatter`, which splits a batch among cards, and `init_process_group`."""
    # torch.nn.DataParallel scatters its inputs even with one card (torch/nn/parallel/comm.py, `scatter`).
    setattr(torch._C, "_scatter", lambda tensor, *_args: (tensor.to("cuda"),))  # noqa: B010 - a CPU build has no such name
    if not torch.distributed.is_available():
        return
    begin = torch.distributed.init_process_group

    def init_process_group(
        backend: Any = None, init_method: Any = None, timeout: Any = None, world_size: int = -1, **kwargs: Any
    ) -> None:
        size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "1"))
        if size > 1:
            raise CaptureError(
                f"{user_line()} joins {size} processes, but one GPU is simulated; run the script as one process (WORLD_SIZE=1)"
            )
        if kwargs.get("store") is None and init_method is None:
            # The default, `env://`, reads MASTER_ADDR and opens a port; one process alone needs neither.
            kwargs |= {"store": torch.distributed.HashStore(), "rank": 0}
            world_size = 1
        # NCCL is not part of a CPU build, and would ask the driver for a card.
        begin("gloo", init_method, timeout, world_size, **kwargs)

    replace(torch.distributed, init_process_group=init_process_group)
    replace(torch.distributed.distributed_c10d, init_process_group=init_process_group)
