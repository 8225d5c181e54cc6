"""GPU memory of a process besides its tensors: the CUDA context and the workspaces of the libraries; and the time of cudaMalloc and cudaFree.

Runs first, in a process that has not used the GPU yet, because a library is loaded once. The context is what the driver reports minus what
torch's allocator has reserved, read after the first tensor, the first matmul, the first matmul with a bias, and the first convolution.
"""

import itertools

import torch
from torch.nn import functional

from tightfit.calibration.instruments import Findings, Instruments, summary
from tightfit.devices.calibration import LIBRARIES, Calibration, Measured
from tightfit.devices.cublas_workspaces import cublas_workspace_bytes, torch_version
from tightfit.units import GIB, MIB, format_bytes

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SIDE = 512
# Each is a segment of its own, and larger than what a segment of 20 MiB with a workspace in it has left.
_ALLOCATIONS = (16 * MIB, 64 * MIB, 256 * MIB, GIB)


def context(instruments: Instruments) -> Findings:
    """The parts of the context and the workspaces of cuBLAS and cuBLASLt."""
    card = instruments.card
    workspaces = _Workspaces()
    parts = {"init": _outside_torch(instruments)}
    for library in ("cublas", "cublaslt"):
        workspaces.read(library, DTYPES[0])
        parts[library] = _outside_torch(instruments)
    functional.conv2d(torch.ones(4, 64, 32, 32, device="cuda"), torch.ones(64, 64, 3, 3, device="cuda"), padding=1)
    parts["cudnn"] = _outside_torch(instruments)
    # Only now: each dtype loads kernels of its own, which would be counted as the library that is read next.
    for dtype in DTYPES[1:]:
        workspaces.read("cublas", dtype)
        workspaces.read("cublaslt", dtype)
    # torch keeps a cuBLAS workspace per handle and stream (aten/src/ATen/cuda/CublasHandlePool.cpp).
    with torch.cuda.stream(torch.cuda.Stream()):
        for dtype in DTYPES:
            workspaces.read("cublas", dtype, on="a side stream")
            workspaces.read("cublaslt", dtype, on="a side stream")
    names = ("init", *LIBRARIES)
    steps = [parts["init"], *(max(0, parts[now] - parts[then]) for then, now in itertools.pairwise(names))]
    predicted = cublas_workspace_bytes(card, torch=torch_version(torch.__version__))
    rows = [
        *(summary(f"context, {name}", "bytes", [size]) for name, size in zip(names, steps, strict=True)),
        summary("context, all libraries", "bytes", [sum(steps)], card.context_bytes),
        *workspaces.rows,
        summary("workspace of cublas, upper bound", "bytes", [workspaces.most["cublas"]], predicted),
    ]
    sizes = {f"{name}_bytes": size for name, size in zip(names, steps, strict=True)}
    whole = {"num_bytes": sum(steps), "low_bytes": parts["init"], "high_bytes": sum(steps)}
    found = {f"{library}_bytes": size for library, size in workspaces.most.items() if size}
    return Findings(rows=rows, tables={"context": whole | sizes, "workspaces": found})


class _Workspaces:
    """Measures how much a matmul allocates besides its output, which is allocated before."""

    def __init__(self) -> None:
        self._square = torch.ones(_SIDE, _SIDE, device="cuda", dtype=DTYPES[0])
        self.rows: list[Measured] = []
        self.most = {"cublas": 0, "cublaslt": 0}

    def read(self, library: str, dtype: torch.dtype, *, on: str = "the main stream") -> None:
        """Runs a matmul of `library` on the current stream and reads the peak, as some versions of torch free the workspace afterwards."""
        matrix = self._square.to(dtype)
        result = torch.empty_like(matrix)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        if library == "cublas":
            torch.mm(matrix, matrix, out=result)
        else:
            # addmm with a bias vector takes the cuBLASLt route for its fused epilogue (aten/src/ATen/native/cuda/Blas.cpp).
            torch.addmm(matrix[0], matrix, matrix, out=result)
        num_bytes = torch.cuda.max_memory_allocated() - before
        self.most[library] = max(self.most[library], num_bytes)
        name = f"workspace of {library}, {str(dtype).removeprefix('torch.')}, {on}"
        self.rows.append(summary(name, "bytes", [num_bytes]))


def context_at_the_end(instruments: Instruments) -> Findings:
    """The context when every kind of kernel has run: an upper bound of what a process is likely to hold."""
    size = _outside_torch(instruments)
    rows = [summary("context, after all measurements", "bytes", [size], instruments.card.context_high_bytes)]
    return Findings(rows=rows, tables={"context": {"high_bytes": size}})


def allocation(instruments: Instruments) -> Findings:
    """Seconds of cudaMalloc and cudaFree by size, through torch's allocator with an empty cache."""
    rows, seconds = [], {"allocate_seconds": [], "free_seconds": []}
    free_bytes = torch.cuda.mem_get_info()[0]
    sizes = [size for size in _ALLOCATIONS if size < free_bytes // 4]
    torch.cuda.empty_cache()
    for size in sizes:
        samples: dict[str, list[float]] = {name: [] for name in seconds}
        # Keeps the tensor alive while cudaMalloc is timed, so that freeing it is not part of the sample.
        held: list[torch.Tensor] = []
        for _ in range(instruments.sizes.num_samples):

            def allocate(size: int = size, held: list[torch.Tensor] = held) -> None:
                held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))

            def expected(calibration: Calibration | None, name: str, size: int = size) -> float | None:
                return _affine(calibration.allocation[name], size) if calibration is not None else None

            samples["allocate_seconds"].append(
                instruments.seconds_of(allocate, lambda c, e=expected: e(c, "allocate_seconds"))
            )
            held.clear()
            # cudaFree waits for the device, so pending work would be counted as its time.
            torch.cuda.synchronize()
            samples["free_seconds"].append(
                instruments.seconds_of(torch.cuda.empty_cache, lambda c, e=expected: e(c, "free_seconds"))
            )
        for name, own in samples.items():
            row = summary(f"{name.removesuffix('_seconds')} {format_bytes(size)}", "s", own)
            rows.append(row)
            seconds[name].append(row.median)
    return Findings(rows=rows, tables={"allocation": {"sizes_bytes": sizes, **seconds}})


def _affine(figures: list[float], size: int) -> float:
    fixed, per_byte = figures
    return fixed + per_byte * size


def _outside_torch(instruments: Instruments) -> int:
    torch.cuda.synchronize()
    return instruments.process_bytes() - torch.cuda.memory_reserved()
