"""The cuBLAS workspace that torch allocates, by GPU and torch version.

torch allocates one buffer per (handle, stream) from its caching allocator at the first matmul and keeps it; on CUDA from 2.15 on it allocates one
for each matmul and frees it, unless `TORCH_CUBLAS_WORKSPACE_CACHE=1` (pytorch #194311). The sizes are those of
`aten/src/ATen/cuda/CublasHandlePool.cpp` (`parseChosenWorkspaceSize`, `parseCUDABlasLtWorkspaceSize`, `getCUDABlasLtWorkspace`):

* cuBLAS: `:4096:2:16:8`, that is 2 x 4096 KiB + 8 x 16 KiB = 8,519,680 bytes; 32 MiB on Hopper, and from torch 2.12 on Blackwell too
  (pytorch #175344), from 2.14 on 11.x (pytorch #189312). ROCm: 32 MiB, on gfx942 and gfx950 128 MiB. `CUBLAS_WORKSPACE_CONFIG` overrides it.

Which release has a change was inferred from the dates of the pull requests and of the releases.
"""

from tightfit.devices.calibration import Calibration
from tightfit.devices.device import Device
from tightfit.units import KIB, MIB

Version = tuple[int, int]
# The version that is assumed where a tape does not say one, the one that this package is tested with.
LATEST: Version = (2, 13)

_DEFAULT_BYTES = 2 * 4096 * KIB + 8 * 16 * KIB
_LARGE_BYTES = 32 * MIB
DEFAULT_CUBLAS_BYTES = (_DEFAULT_BYTES, _LARGE_BYTES)


def torch_version(text: str) -> Version:
    """The major and minor number of a version such as `2.13.0+cu130`."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def cublas_workspace_bytes(device: Device, *, torch: Version = LATEST, calibration: Calibration | None = None) -> int:
    """Bytes of the cuBLAS (hipBLAS) workspace of one stream, as `calibration` measured it or as torch chooses it."""
    if calibration is not None and calibration.cublas_bytes is not None:
        return calibration.cublas_bytes
    # ROCm chooses by the gfx architecture (parseChosenWorkspaceSize), not by a compute capability.
    if device.vendor == "amd":
        return 128 * MIB if device.isa in ("gfx942", "gfx950") else _LARGE_BYTES
    return default_cublas_bytes(device.compute_capability, torch=torch)


def default_cublas_bytes(compute_capability: tuple[int, int], *, torch: Version = LATEST) -> int:
    """Bytes of the workspace that torch chooses on an NVIDIA GPU: large for 9.0, from 2.12 for 10.x and 12.x, from 2.14 for 11.x."""
    major = compute_capability[0]
    large = (
        compute_capability == (9, 0) or (torch >= (2, 12) and major in (10, 12)) or (torch >= (2, 14) and major == 11)
    )
    return _LARGE_BYTES if large else _DEFAULT_BYTES
