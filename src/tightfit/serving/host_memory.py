"""What an engine keeps at the host: a cache beside that of the card, and the weights while it sleeps.

torch rounds each block of pinned memory up to a power of two (aten/src/ATen/core/CachingHostAllocator.h of 2.11 to 2.13, unless `pinned_max_round_threshold` is set), so that a buffer for each layer is up
to twice of what was asked for. Read in vLLM 0.21.0: the size that is asked for is of all ranks, in whole pages (vllm/v1/kv_offload/cpu/spec.py), each tensor of the cache has a pinned buffer
(cpu/gpu_worker.py); a level-1 sleep copies each allocation of the pool of weights to a pinned buffer and drops the pool of the cache (vllm/device_allocator/cumem.py, vllm/v1/worker/gpu_worker.py).
Which blocks the pool of weights has depends on how the engine fuses them, so what they take at the host is known within a factor of two: from their bytes to twice that.
"""

import dataclasses

from tightfit.cost.copies import copy_seconds
from tightfit.devices.device import Device


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sleep:
    """An engine that sleeps (vLLM's level 1): bytes that it holds on a card, its weights at the host (pinned, in powers of two: up to twice of that), and seconds until it is awake."""

    gpu_bytes: int
    host_bytes: int
    wake_seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostCache:
    """A cache at the host of `asked_bytes` for all cards together: bytes of pinned memory, and tokens that it holds."""

    asked_bytes: int
    pinned_bytes: int
    num_tokens: int


def asleep(device: Device, *, weights_bytes: int, graph_bytes: int, outside_bytes: int) -> Sleep:
    """The weights go to the host and the cache is dropped; context, communicators and graphs stay."""
    return Sleep(
        gpu_bytes=graph_bytes + max(outside_bytes, device.context_bytes),
        host_bytes=weights_bytes,
        wake_seconds=copy_seconds(weights_bytes, device, to_card=True),
    )


def host_cache(asked_bytes: int, *, num_layers: int, degree: int, token_bytes: int, block_tokens: int = 1) -> HostCache:
    """A buffer of pinned memory for each layer on each rank, with room for whole pages of `block_tokens`."""
    page = token_bytes * degree * block_tokens
    num_pages = asked_bytes // page if page else 0
    each = num_pages * page // (max(1, num_layers) * degree)
    return HostCache(
        asked_bytes=asked_bytes,
        pinned_bytes=power_of_two(each) * num_layers * degree,
        num_tokens=num_pages * block_tokens,
    )


def power_of_two(num_bytes: int) -> int:
    """The smallest power of two that is no less, 0 of 0."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0
