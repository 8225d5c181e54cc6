"""Page-locked host memory as a tensor of the card: kernels read and write it over the link, without a copy on the card (CUDA's zero-copy memory).

What is at the host is so still a tensor of the card for the program: its device is the same, random numbers for it come from the card's generator, it
mixes with other tensors there, and its gradient accumulator stays (torch makes a new one when the data of a parameter changes its device: `set_data`,
torch/csrc/autograd/variable.cpp). The pointer is the host's own, which unified addressing makes valid on the card (CUDA C++ Programming Guide, "Mapped
Memory"), on Linux at least (`cudaDevAttrCanUseHostPointerForRegisteredMem`). Memory that is not registered with the driver cannot be seen so, and
neither is what torch would give to another card than the one that is asked for.
"""

import sys
from typing import Any

import numpy as np
import torch

from tightfit.capture.processes.process_role import is_simulated


class _OfCard:
    """Host memory in the protocol by which libraries hand on memory of a card (`__cuda_array_interface__`, version 3)."""

    def __init__(self, at_host: torch.Tensor) -> None:
        self._held = at_host
        self.__cuda_array_interface__ = {
            "shape": (at_host.numel(),),
            "typestr": "|u1",
            "data": (at_host.data_ptr(), False),
            "version": 3,
        }


class OfHost:
    """The same bytes in numpy's protocol."""

    def __init__(self, on_card: torch.Tensor) -> None:
        self._held = on_card
        self.__array_interface__ = {
            "shape": (on_card.numel(),),
            "typestr": "|u1",
            "data": (on_card.data_ptr(), False),
            "version": 3,
        }


def seen_from(device: torch.device, at_host: torch.Tensor) -> torch.Tensor:
    """The bytes (uint8, contiguous, of one dimension) as a tensor on `device`, in a storage of its own; the tensor itself where that is not possible."""
    if device.type != "cuda" or is_simulated() or not at_host.numel() or not at_host.is_pinned():
        return at_host
    if torch.version.cuda is None or sys.platform != "linux":
        return at_host
    given: Any = _OfCard(at_host)
    with torch.inference_mode(False):
        seen = torch.as_tensor(given, device=device)
    # Torch takes the card on which the memory was registered, and copies to another one.
    return seen if seen.data_ptr() == at_host.data_ptr() else at_host


def at_host(tensor: torch.Tensor) -> torch.Tensor:
    """What `seen_from` has shown, or a part of it, as bytes at the host again (uint8, of one dimension); what is at the host anyway, likewise.

    `tensor` is to be contiguous. What the card still computes on these bytes is not waited for.
    """
    flat = tensor.detach().view(-1).view(torch.uint8) if tensor.dim() != 1 or tensor.dtype != torch.uint8 else tensor
    if flat.device.type == "cpu" or is_simulated() or not flat.numel():
        return flat
    given: Any = OfHost(flat)
    return torch.from_numpy(np.asarray(given))
