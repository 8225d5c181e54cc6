"""GPU memory of a process before its first tensor (the CUDA context), for GPUs on which it has not been measured.

A CUDA context reserves local memory for every thread that can be resident, keeps queues and save areas per multiprocessor, and loads
the kernels that are used. So it grows with the number of multiprocessors and with the threads that each can hold, and that is the model:

    50 MiB + multiprocessors x (0.6 MiB + resident threads x 1.5 KiB), a fifth more on compute capability 10 and up

Fitted by hand to readings with CUDA 12 and 13 (lazy loading of kernels): T4 135 MiB (torch-preflight, torch 2.11, all of CUDA, cuBLAS and
cuDNN loaded), and differences between the memory of a process and torch's own in public out-of-memory messages: RTX A4000 210, A10 224, L4 236-255,
RTX 3080 257-266, V100 379-399, RTX A6000 294-317, RTX 3090 315, RTX 4090 439, RTX 6000 Ada 429-507, A100 409-501, H100 522, GH200 543, RTX 5090 593-672,
B200 712 MiB. It is within 22 % of each of them. Contexts without libraries are smaller (RTX 4060 Ti 107, RTX PRO 6000 555 MiB, llama.cpp #23604),
heavy use of cuDNN makes them larger (H100 NVL 768 MiB): hence the range. Before CUDA 11.7 all kernels were loaded at once, over 1 GiB.
"""

from tightfit.devices.device import Context
from tightfit.units import KIB, MIB

_FIXED_BYTES = 50 * MIB
_PER_MULTIPROCESSOR_BYTES = 0.6 * MIB
_PER_THREAD_BYTES = 1.5 * KIB
_BLACKWELL = 1.2
# The low end is a context before any library is loaded, the high end one with many kernels of cuDNN.
_RANGE = (0.7, 1.45)
# No reading of a ROCm process was found: a wide guess that a calibration should replace.
_AMD = Context(num_bytes=500 * MIB, low_bytes=150 * MIB, high_bytes=1000 * MIB, is_measured=False)


def modelled_context(
    *, vendor: str, compute_capability: tuple[int, int], num_multiprocessors: int, max_threads_per_multiprocessor: int
) -> Context:
    """The context on a GPU of this size, in bytes, with a range that covers all readings."""
    if vendor == "amd":
        return _AMD
    per_multiprocessor = _PER_MULTIPROCESSOR_BYTES + max_threads_per_multiprocessor * _PER_THREAD_BYTES
    # RTX 5090 and B200 read 593 to 712 MiB, a fifth above what the same model gives for older cards of their size.
    generation = _BLACKWELL if compute_capability >= (10, 0) else 1.0
    num_bytes = _FIXED_BYTES + generation * num_multiprocessors * per_multiprocessor
    low, high = (round(factor * num_bytes) for factor in _RANGE)
    return Context(num_bytes=round(num_bytes), low_bytes=low, high_bytes=high, is_measured=False)
