"""What a backward pass that is made again must find as the first one found it, and leave as it was: random generators, and buffers of the model.

A pass runs code of the program's where that checkpoints blocks by itself, or has functions whose backward calls modules: those draw, and write to buffers.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch

from tightfit.effects.random_states import AllRandom
from tightfit.torch_hooks.manifest import SET_VERSIONS


@contextmanager
def drawing_as(before: AllRandom | None) -> Iterator[None]:
    """Draws what was drawn from `before` on, and leaves the generators as they are; does nothing where nothing was drawn."""
    if before is None:
        yield
        return
    present = AllRandom.now()
    before.put()
    try:
        yield
    finally:
        present.put()


@contextmanager
def as_before(tensors: Collection[torch.Tensor]) -> Iterator[None]:
    """Restores the elements of tensors that are written to inside."""
    # A larger buffer that was never written to, such as a mask, is not saved.
    saved = [tensor for tensor in tensors if tensor._version or may_be_statistics(tensor)]
    before = [(tensor, tensor._version, tensor.detach().clone()) for tensor in saved]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, version, value in before:
                if tensor._version != version:
                    tensor.copy_(value)
                elif may_be_statistics(tensor):
                    tensor.copy_(value)
                    SET_VERSIONS.value()((tensor,), (version,))


def may_be_statistics(tensor: torch.Tensor) -> bool:
    """Whether kernels may write to it without a version: running statistics (`native_batch_norm`, aten/src/ATen/native/native_functions.yaml, declares no
    write), a number for each channel."""
    return (
        tensor.layout == torch.strided and tensor.dim() == 1 and tensor.is_contiguous() and tensor.is_floating_point()
    )
