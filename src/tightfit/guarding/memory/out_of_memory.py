"""Tells out-of-memory errors from others, and frees what such an error and its process hold without need."""

import gc
import re

import torch

# What the libraries below torch raise in place of `torch.OutOfMemoryError`: cuBLAS and cuDNN where they cannot make a handle or a workspace, the
# host's allocator (c10/core/impl/alloc_cpu.cpp).
_MESSAGES = (
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "CUFFT_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)
# What a call of the driver that fails outside of the caching allocator raises (pinned memory, a kernel's stack); torch has had a class for it since 2.8.
# Its other messages may not end with the step: after an illegal access the card answers with nothing else.
_ACCELERATOR_ERROR: type[BaseException] | None = getattr(torch, "AcceleratorError", None)
_DRIVER_MESSAGE = re.compile(r"(?:CUDA|HIP) error: out of memory\b")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the card or the host had no memory left, and the process can go on.

    Of the classes below RuntimeError only torch's own two: a program's may stand for anything, and a collective that failed for want of memory
    (DistBackendError) leaves the other ranks waiting.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if _ACCELERATOR_ERROR is not None and type(error) is _ACCELERATOR_ERROR:
        return _DRIVER_MESSAGE.match(str(error)) is not None
    return type(error) is RuntimeError and any(message in str(error) for message in _MESSAGES)


def without_frames(error: BaseException) -> BaseException:
    """The error without the frames that it went through, whose variables keep the tensors of the failed step alive."""
    seen = set[int]()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = None
            waiting += [each.__cause__, each.__context__]
    return error


def release_memory() -> None:
    """Frees what only reference cycles hold, and gives the cached memory of every card back to the driver."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def drop_failed_backward() -> None:
    """Drops what a backward pass that failed had still to do: it stays in the queue of torch's engine, and with it what the graph has saved, until this
    thread's next pass (torch/csrc/autograd/engine.cpp). Not within a pass, whose own rest would be run here.
    """
    with torch.enable_grad():
        one = torch.zeros((), device="cpu", requires_grad=True)
        torch.autograd.grad(one * 1, one)
