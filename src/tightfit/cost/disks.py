"""Seconds of moving tensors between host memory and disk, past the page cache and in large pieces.

Without a calibration file (`tightfit calibrate` measures the disk) one NVMe drive of a server is assumed, at what DeepNVMe reaches on each of four:
10 GB/s of reads and 5 GB/s of writes together (DeepSpeed's blog on DeepNVMe, June 2024). Fast new drives do four times as much, network disks less:
a plan with `--disk` is worth a measurement.
"""

from tightfit.devices.calibration import Calibration

_READ_BYTES_PER_SECOND = 2.5e9
_WRITE_BYTES_PER_SECOND = 1.25e9
_LATENCY_SECONDS = 200e-6
"""From a request until a thread of Python has it on the disk or back: of a drive itself half of that."""


def disk_costs(*, to_disk: bool, calibration: Calibration | None = None) -> tuple[float, float]:
    """The fixed seconds of a write (`to_disk`) or read, and its bytes per second: measured by `calibration`, or typical."""
    key = f"{'write' if to_disk else 'read'}_bytes_per_second"
    typical = _WRITE_BYTES_PER_SECOND if to_disk else _READ_BYTES_PER_SECOND
    return _LATENCY_SECONDS, typical if calibration is None else calibration.disk.get(key, typical)


def disk_seconds(num_bytes: int, *, to_disk: bool, calibration: Calibration | None = None) -> float:
    """Seconds to write `num_bytes` to a disk (`to_disk`) that nothing else uses, or to read them."""
    latency, rate = disk_costs(to_disk=to_disk, calibration=calibration)
    return latency + num_bytes / rate
