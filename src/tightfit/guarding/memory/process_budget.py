"""A budget for a whole process on its card: what torch's caching allocator may hold of it is what the CUDA context leaves.

The allocator takes its share from `per_process_memory_fraction` in `PYTORCH_CUDA_ALLOC_CONF` (c10/cuda/CUDAAllocatorConfig.h, torch 2.10 to 2.15), and
so before CUDA is initialised: a script may still choose its cards. Beyond it an allocation fails as on a full card, which is what a guard is for.
"""

import math

from tightfit.errors import UsageError
from tightfit.units import format_bytes

_PARTS = 1_000_000


def allocator_setting(budget_bytes: int, *, capacity_bytes: int, outside_bytes: int) -> str:
    """The setting with which a process holds at most `budget_bytes` of a card of `capacity_bytes`, where it holds `outside_bytes` outside of torch.

    Raises:
        UsageError: the budget is larger than the card, or not larger than what is held outside of torch.
    """
    if budget_bytes > capacity_bytes:
        raise UsageError(
            f"--budget {format_bytes(budget_bytes)}: the GPU has {format_bytes(capacity_bytes)}; give at most that"
        )
    left = budget_bytes - outside_bytes
    if left <= 0:
        raise UsageError(
            f"--budget {format_bytes(budget_bytes)}: the CUDA context alone takes about {format_bytes(outside_bytes)}; give more"
        )
    # Rounded down: the budget holds.
    return f"per_process_memory_fraction:{math.floor(left / capacity_bytes * _PARTS) / _PARTS:.6f}"
