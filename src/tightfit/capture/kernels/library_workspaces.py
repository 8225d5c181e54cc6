"""cuBLAS workspaces: one per library handle and stream, allocated from the caching allocator at the first product and never freed.

PyTorch hands cuBLAS its workspace itself (aten/src/ATen/cuda/CublasHandlePool.cpp). A handle belongs to a host thread, so a training step
holds two: one for the thread of the forward pass, one for the autograd thread of the device. Recordings of training steps show exactly two,
those of inference one.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch._ops import OpOverload

from tightfit.capture.kernels.architecture import Card
from tightfit.devices.cublas_workspaces import default_cublas_bytes
from tightfit.devices.cublas_workspaces import torch_version as torch_version_of
from tightfit.units import KIB

aten = torch.ops.aten

_LT_KIB = 1024
_CONFIG = re.compile(r":([0-9]+):([0-9]+)")

PRODUCTS = frozenset(
    operator
    for packet in (
        aten.mm,
        aten.bmm,
        aten.addmm,
        aten.addmm_,
        aten.baddbmm,
        aten.baddbmm_,
        # One product of all, through `addmm_` (LinearAlgebra.cpp, `addbmm_impl_`).
        aten.addbmm,
        aten.addbmm_,
        aten.addmv,
        aten.addmv_,
        aten.mv,
        aten.dot,
        aten.vdot,
        aten._addmm_activation,
        aten._scaled_mm,
        aten._int_mm,
        aten.linalg_solve_triangular,
        aten.triangular_solve,
    )
    for operator in (getattr(packet, overload) for overload in packet.overloads())
)
"""The operators that call cuBLAS."""
# Scaled and int8 products have no path through plain cuBLAS.
_ALWAYS_LT = frozenset((aten._scaled_mm.default, aten._int_mm.default))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """A workspace that an operator needs. A persistent one is allocated once for its kind, host thread and stream, and retained."""

    kind: Literal["cublas", "cublaslt"]
    num_bytes: int
    persistent: bool


def cublas_workspace_bytes(card: Card, environ: Mapping[str, str], torch_version: str = torch.__version__) -> int:
    """Bytes of one cuBLAS workspace: `CUBLAS_WORKSPACE_CONFIG` (":SIZE:COUNT" in KiB, repeated) or the card's default.

    A value that does not parse counts as unset (`parseChosenWorkspaceSize`).
    """
    pairs = _CONFIG.findall(environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return sum(int(size) * KIB * int(count) for size, count in pairs)
    return default_cublas_bytes(card.compute_capability, torch=torch_version_of(torch_version))


def uses_cublaslt(
    operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], environ: Mapping[str, str]
) -> bool:
    """Whether a product goes through cuBLASLt: `addmm` that adds a row vector in its epilogue (`isInputCompliesAddmmCudaLt`, Blas.cpp)."""
    if operator in _ALWAYS_LT:
        return True
    if (
        operator not in (aten.addmm.default, aten._addmm_activation.default)
        or environ.get("DISABLE_ADDMM_CUDA_LT") == "1"
    ):
        return False
    bias, left, right = args[:3]
    row = bias.is_contiguous() and bias.numel() == bias.shape[-1] == right.shape[1] if bias.dim() else False
    activated = operator is aten._addmm_activation.default and bias.dim() == 2
    floating = left.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    return bool(kwargs.get("beta", 1) == 1 and (row or activated) and floating and min(*left.shape, *right.shape) > 1)


def workspaces(
    operator: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    card: Card,
    environ: Mapping[str, str],
    torch_version: str = torch.__version__,
) -> tuple[Workspace, ...]:
    """The workspaces that an operator needs, in the order of allocation; empty for operators that do not call cuBLAS.

    From torch 2.11 cuBLASLt works in cuBLAS's workspace unless `TORCH_CUBLASLT_UNIFIED_WORKSPACE=0` (PR 168175); before, and with that
    setting, it keeps its own of `CUBLASLT_WORKSPACE_SIZE` KiB (1024).
    """
    if operator not in PRODUCTS:
        return ()
    found = [Workspace(kind="cublas", num_bytes=cublas_workspace_bytes(card, environ, torch_version), persistent=True)]
    unified = (
        environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1" if torch_version_of(torch_version) >= (2, 11) else "0")
        == "1"
    )
    if not unified and uses_cublaslt(operator, args, kwargs, environ):
        setting = environ.get("CUBLASLT_WORKSPACE_SIZE", "")
        size = int(setting) if setting.isdigit() else _LT_KIB
        # Up to 2.6 each call allocates one and frees it (CUDABlas.cpp, `gemm_and_bias`).
        is_kept = torch_version_of(torch_version) >= (2, 7)
        found.append(Workspace(kind="cublaslt", num_bytes=size * KIB, persistent=is_kept))
    return tuple(workspace for workspace in found if workspace.num_bytes)
