"""What Triton asks about the card, and what it gets back for a compiled kernel: the virtual GPU in place of its driver.

Sources: triton/runtime/driver.py (`DriverConfig.set_active`), triton/backends/nvidia/driver.py (`CudaDriver`), triton/testing.py (`do_bench`).
"""

from __future__ import annotations

import collections
import importlib
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

BUFFER_BYTES = 256 << 20
"""The buffer with which Triton clears the L2 cache between runs of a benchmark (`get_empty_cache_for_benchmark`)."""

_MILLISECONDS = 1.0


class Benchmark:
    """Runs a kernel as Triton's tuning does, for the memory that this takes; `is_running` while it does."""

    def __init__(self) -> None:
        self.is_running = False

    def __call__(
        self, fn: Callable[[], Any], *_args: Any, quantiles: Sequence[float] | None = None, **kwargs: Any
    ) -> Any:
        """`triton.testing.do_bench`: every kernel takes the same time."""
        with self._running():
            fn()
            buffer = torch.empty(BUFFER_BYTES // 4, dtype=torch.int, device="cuda")
            fn()
            del buffer
        if quantiles is not None:
            return [_MILLISECONDS] * len(quantiles)
        return [_MILLISECONDS] if kwargs.get("return_mode") == "all" else _MILLISECONDS

    @contextmanager
    def _running(self) -> Iterator[None]:
        before, self.is_running = self.is_running, True
        try:
            yield
        finally:
            self.is_running = before


class VirtualDriver:
    """Answers as `triton.runtime.driver.active`."""

    def __init__(self, benchmark: Benchmark) -> None:
        self._benchmark = benchmark
        self.utils = types.SimpleNamespace(get_device_properties=_properties)

    def get_current_device(self) -> int:
        """The index of the card."""
        return 0

    def set_current_device(self, device: int) -> None:
        """There is one card."""

    def get_current_stream(self, device: int | None = None) -> int:
        """The number of the current stream."""
        return torch.cuda.current_stream().cuda_stream

    def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
        """The compute capability."""
        return torch.cuda.get_device_capability()

    def get_current_target(self) -> Any:
        """The card as Triton's compiler names it."""
        major, minor = torch.cuda.get_device_capability()
        return importlib.import_module("triton.backends.compiler").GPUTarget("cuda", major * 10 + minor, 32)

    def get_active_torch_device(self) -> torch.device:
        """The card as torch names it."""
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        """The module with streams and events."""
        return torch.cuda

    def get_benchmarker(self) -> Benchmark:
        """The function that times kernels."""
        return self._benchmark

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        """The buffer that clears the cache."""
        return torch.empty(BUFFER_BYTES // 4, dtype=torch.int, device="cuda")

    def clear_cache(self, cache: torch.Tensor) -> None:
        """Overwrites the cache with the buffer."""
        cache.zero_()


def _properties(_device: int) -> dict[str, int]:
    card: Any = torch.cuda.get_device_properties(0)
    return {
        "max_shared_mem": card.shared_memory_per_block_optin,
        "max_num_regs": card.regs_per_multiprocessor,
        "multiprocessor_count": card.multi_processor_count,
        "warpSize": card.warp_size,
        # Clocks in kHz and the width of the bus in bits only rank configurations against each other, and none of them is timed.
        "sm_clock_rate": 1_500_000,
        "mem_clock_rate": 5_000_000,
        "mem_bus_width": 4096,
    }


class CompiledKernel:
    """What a launch or `warmup` returns: can be launched, and answers what programs ask to choose a grid."""

    def __init__(self, name: str, launch: Callable[..., Any], num_warps: int) -> None:
        self.name = name
        # Of the most registers that still let a multiprocessor of every generation be filled: 65,536 over 2,048 threads.
        self.n_regs = 32
        self.n_spills = 0
        self.n_max_threads = 1024
        self.num_warps = num_warps
        self.shared = 0
        self.metadata = types.SimpleNamespace(
            name=name, shared=0, num_warps=num_warps, num_stages=1, num_ctas=1, target=None, global_scratch_size=0
        )
        self.asm: dict[str, str] = collections.defaultdict(str)
        self._launch = launch

    def _init_handles(self) -> None:
        """Loads the kernel on the card."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, stream: Any = None) -> None:
            self._launch(*args, grid=grid)

        return launch
