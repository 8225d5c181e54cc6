"""Seconds of a copy between a card and its host.

A link reaches a fraction of its limit: PCIe 4 0.79 (24.8 of 31.5 GB/s), PCIe 5 0.88 (55.6 of 63 GB/s, the example of nvbandwidth), NVLink-C2C 0.78
(350 of 450 GB/s, torchtitan's notes); pageable memory about half of that, because the driver copies it through a pinned buffer. Copies in
both directions at once are not always free: boards have been seen to fall to 24 and 11 GB/s (NVIDIA developer forum 352186), so
measure before counting on it.
"""

from tightfit.devices.device import Device, HostLink

_REACHED = {3: 0.79, 4: 0.79, 5: 0.88, 6: 0.88}
_REACHED_C2C = 0.78
_PAGEABLE = 0.5
# A cudaMemcpyAsync of a few bytes takes about this long from issue to arrival.
_LATENCY_SECONDS = 10e-6


def link_bytes_per_second(link: HostLink, *, is_pinned: bool = True) -> float:
    """Bytes per second that large copies in one direction reach over `link`."""
    reached = _REACHED[link.generation] if link.kind == "pcie" else _REACHED_C2C
    return link.bytes_per_second * reached * (1.0 if is_pinned else _PAGEABLE)


def copy_seconds(num_bytes: int, device: Device, *, is_pinned: bool = True) -> float:
    """Seconds to copy `num_bytes` from or to the host, on a link that nothing else uses."""
    return _LATENCY_SECONDS + num_bytes / link_bytes_per_second(device.link, is_pinned=is_pinned)
