"""How much scratch memory cuBLAS gets from torch, by card and torch version.

torch takes one buffer per (handle, stream) from its caching allocator at the first matrix product and keeps it; on CUDA from 2.15 on it takes one
for each product and gives it back, unless `TORCH_CUBLAS_WORKSPACE_CACHE=1` (pytorch #194311). The sizes are those of
`aten/src/ATen/cuda/CublasHandlePool.cpp` (`parseChosenWorkspaceSize`, `parseCUDABlasLtWorkspaceSize`, `getCUDABlasLtWorkspace`):

* cuBLAS: `:4096:2:16:8`, that is 2 x 4096 KiB + 8 x 16 KiB = 8,519,680 bytes; 32 MiB on Hopper, and from torch 2.12 on Blackwell too
  (pytorch #175344). ROCm: 32 MiB, on gfx942 and gfx950 128 MiB. `CUBLAS_WORKSPACE_CONFIG` overrides it.
* cuBLASLt: a buffer of its own, 1 MiB (pytorch #73439), but from torch 2.11 (pytorch #168175) to 2.14 the cuBLAS buffer of the same stream
  serves both. ROCm: its own, 76 MiB. `CUBLASLT_WORKSPACE_SIZE` overrides it.

Which release a change is in was told by the dates of the pull requests and of the releases.
"""

import re

from tightfit.devices.calibration import Calibration
from tightfit.devices.device import Device
from tightfit.errors import UsageError
from tightfit.units import KIB, MIB

Version = tuple[int, int]
LATEST: Version = (2, 13)

_DEFAULT_BYTES = 2 * 4096 * KIB + 8 * 16 * KIB
_LARGE_BYTES = 32 * MIB
_BLACKWELL_SINCE: Version = (2, 12)
_SHARED_SINCE: Version = (2, 11)
_PER_PRODUCT_SINCE: Version = (2, 15)
_CONFIG = re.compile(r":(\d+):(\d+)")


def torch_version(text: str) -> Version:
    """The major and minor number of a version such as `2.13.0+cu130`."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def cublas_workspace_bytes(
    device: Device, *, torch: Version = LATEST, config: str | None = None, calibration: Calibration | None = None
) -> int:
    """Bytes of the cuBLAS (hipBLAS) workspace of one stream.

    `config` is the value of `CUBLAS_WORKSPACE_CONFIG`, `:KIB:COUNT` once or more; it goes before what `calibration` measured.

    Raises:
        UsageError: `config` has another form.
    """
    if config is not None:
        pairs = _CONFIG.findall(config)
        if not pairs or "".join(f":{kib}:{count}" for kib, count in pairs) != config:
            raise UsageError(
                f"CUBLAS_WORKSPACE_CONFIG = '{config}' must be of the form :4096:8, sizes in KiB and counts"
            )
        return sum(int(kib) * KIB * int(count) for kib, count in pairs)
    if calibration is not None and calibration.cublas_bytes is not None:
        return calibration.cublas_bytes
    if device.vendor == "amd":
        return 128 * MIB if device.isa in ("gfx942", "gfx950") else _LARGE_BYTES
    major = device.compute_capability[0]
    if major == 9 or (major >= 10 and torch >= _BLACKWELL_SINCE):
        return _LARGE_BYTES
    return _DEFAULT_BYTES


def cublaslt_workspace_bytes(device: Device, *, torch: Version = LATEST, calibration: Calibration | None = None) -> int:
    """Bytes that cuBLASLt (hipBLASLt) takes on one stream besides the cuBLAS workspace: none where it shares that one."""
    if calibration is not None and calibration.cublaslt_bytes is not None:
        return calibration.cublaslt_bytes
    if device.vendor == "amd":
        return 76 * MIB
    return 0 if _SHARED_SINCE <= torch < _PER_PRODUCT_SINCE else MIB


def keeps_workspaces(device: Device, *, torch: Version = LATEST) -> bool:
    """Whether a workspace stays allocated once a stream has had its first matrix product, rather than for the length of each one."""
    return device.vendor == "amd" or torch < _PER_PRODUCT_SINCE
