"""What an engine keeps at the host: a cache beside that of the card, and the weights while it sleeps.

torch rounds each block of pinned memory up to a power of two (aten/src/ATen/core/CachingHostAllocator.h), so that a buffer for each layer is up to twice of what was asked for.
"""

import dataclasses

from tightfit.cost.copies import copy_seconds
from tightfit.devices.device import Device


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sleep:
    """An engine that sleeps (vLLM's level 1): bytes that it holds on a card, its weights at the host, and seconds until it is awake."""

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


def host_cache(asked_bytes: int, *, num_layers: int, degree: int, token_bytes: int) -> HostCache:
    """A buffer of pinned memory for each layer on each rank."""
    each = asked_bytes // (max(1, num_layers) * degree)
    return HostCache(
        asked_bytes=asked_bytes,
        pinned_bytes=power_of_two(each) * num_layers * degree,
        num_tokens=asked_bytes // (token_bytes * degree) if token_bytes else 0,
    )


def power_of_two(num_bytes: int) -> int:
    """The smallest power of two that is no less, 0 of 0."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0
