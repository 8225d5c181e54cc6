"""Seconds of a copy between GPU and host.

A link reaches a fraction of its limit: PCIe 4 0.79 (24.8 of 31.5 GB/s), PCIe 5 0.88 (55.6 of 63 GB/s, the example of nvbandwidth), NVLink-C2C 0.78
(350 of 450 GB/s, torchtitan's notes); pageable memory about half of that, because the driver copies it through a pinned buffer. Copies in
both directions at once are not always free: boards have been seen to fall to 24 and 11 GB/s (NVIDIA developer forum 352186), so
measure before counting on it.
"""

from tightfit.devices.calibration import Calibration
from tightfit.devices.device import Device, HostLink

_REACHED = {3: 0.79, 4: 0.79, 5: 0.88, 6: 0.88}
_REACHED_C2C = 0.78
_PAGEABLE = 0.5
# A cudaMemcpyAsync of a few bytes takes about this long from issue to arrival.
_LATENCY_SECONDS = 10e-6


def link_bytes_per_second(
    link: HostLink, *, is_pinned: bool = True, to_card: bool = True, calibration: Calibration | None = None
) -> float:
    """Bytes per second of large copies in one direction over `link`: measured by `calibration`, or typical of its kind."""
    way = "to_card" if to_card else "from_card"
    key = f"{way}_{'registered' if is_pinned else 'pageable'}_bytes_per_second"
    # Memory that torch pins is priced as registered memory: both are page-locked.
    if calibration is not None and key in calibration.link:
        return calibration.link[key]
    reached = _REACHED[link.generation] if link.kind == "pcie" else _REACHED_C2C
    return link.bytes_per_second * reached * (1.0 if is_pinned else _PAGEABLE)


def copy_seconds(
    num_bytes: int,
    device: Device,
    *,
    is_pinned: bool = True,
    to_card: bool = True,
    calibration: Calibration | None = None,
) -> float:
    """Seconds to copy `num_bytes` from the host (`to_card`) or to it, on a link that nothing else uses."""
    latency, rate = copy_costs(device, is_pinned=is_pinned, to_card=to_card, calibration=calibration)
    return latency + num_bytes / rate


def copy_costs(
    device: Device, *, is_pinned: bool = True, to_card: bool = True, calibration: Calibration | None = None
) -> tuple[float, float]:
    """The fixed seconds of a copy and its bytes per second."""
    latency = _LATENCY_SECONDS if calibration is None else calibration.link.get("latency_seconds", _LATENCY_SECONDS)
    rate = link_bytes_per_second(device.link, is_pinned=is_pinned, to_card=to_card, calibration=calibration)
    return latency, rate
