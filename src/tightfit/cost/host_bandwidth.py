"""Seconds of parameter updates on the host, which are bound by its memory.

torch's fused AdamW on 2 threads updates 2.09 billion parameters of float32 a second, as fast as DeepSpeed's CPUAdam (measured, docs/log.md): it
reads and writes 28 bytes for each. A machine with more memory channels is faster: `tightfit calibrate` measures it.
"""

from tightfit.devices.calibration import Calibration

_BYTES_PER_PARAMETER = 28
HOST_BYTES_PER_SECOND = 2.09e9 * _BYTES_PER_PARAMETER


def host_bytes_per_second(calibration: Calibration | None = None) -> float:
    """Bytes that updates on the host read and write in a second, beside copies: measured by `calibration`, or typical of a small machine."""
    table = {} if calibration is None else calibration.host
    for key in ("adamw_beside_copies_parameters_per_second", "adamw_parameters_per_second"):
        if key in table:
            return max(table[key]) * _BYTES_PER_PARAMETER
    return HOST_BYTES_PER_SECOND
