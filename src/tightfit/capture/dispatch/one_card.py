"""One card is simulated, of a process of a distributed program its own: a program that asks for a second one gets an error of one line.

On the virtual GPU the card is always cuda:0; the process of local rank 3 may call its own cuda:3 as well.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

from tightfit.capture.observe.attribution import user_line
from tightfit.capture.replace import replace
from tightfit.errors import CaptureError
from tightfit.errors.faults import hands_over

_names: set[int] = {0}


def also_named(index: int) -> None:
    """The card answers to `cuda:INDEX` too."""
    _names.add(index)


@hands_over
def _index_of(device: Any) -> int | None:
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        return device.index if device.type == "cuda" else None
    return device if isinstance(device, int) else None


@hands_over
def check(device: Any) -> None:
    """Accepts `cuda` and `cuda:0`, in any form that a program may name them, and the card of a distributed process.

    Raises:
        CaptureError: it is another card.
    """
    index = _index_of(device)
    if index is not None and index > 0 and index not in _names:
        own = " and ".join(f"cuda:{number}" for number in sorted(_names))
        raise CaptureError(
            f"{user_line()} uses cuda:{index}, but one GPU is simulated, {own}; estimate the work of one GPU, or of one rank of several (--gpus, --rank)"
        )


@hands_over
def is_renamed(device: Any) -> bool:
    """Whether `device` is the card under another name than cuda:0.

    Raises:
        CaptureError: it is another card.
    """
    check(device)
    return bool(_index_of(device))


def install() -> None:
    """Patches `scatter`, which splits a batch among cards."""
    # torch.nn.DataParallel scatters its inputs even with one card (torch/nn/parallel/comm.py, `scatter`).
    setattr(torch._C, "_scatter", lambda tensor, *_args: (tensor.to("cuda"),))  # noqa: B010 - a CPU build has no such name


def one_process(communicate: Callable[[], None]) -> None:
    """Patches `init_process_group` of a program that is no distributed one: `communicate` puts a group of one process in the place of real ones, which
    read the data of tensors, when the program makes the first. Torch takes long to load what that needs."""
    if not torch.distributed.is_available():
        return
    begin = torch.distributed.init_process_group

    def give(function: Callable[..., None]) -> None:
        replace(torch.distributed, init_process_group=function)
        replace(torch.distributed.distributed_c10d, init_process_group=function)

    def init_process_group(
        backend: Any = None, init_method: Any = None, timeout: Any = None, world_size: int = -1, **kwargs: Any
    ) -> None:
        size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "1"))
        if size > 1:
            raise CaptureError(
                f"{user_line()} joins {size} processes, but one GPU is simulated; estimate one rank of them with --gpus {size}"
            )
        if torch.distributed.init_process_group is init_process_group:
            give(begin)
            communicate()
        torch.distributed.init_process_group(backend, init_method, timeout, world_size, **kwargs)

    give(init_process_group)
