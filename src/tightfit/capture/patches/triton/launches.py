"""Launches of Triton kernels on the virtual GPU: an operator that reads and writes tensors that are there already, and allocates nothing.

The kernel is neither compiled nor run. A launch is dispatched as an operator of the namespace `triton`, so that everything that watches operators
sees it: what it may write to is found in the kernel's source (`tightfit.capture.patches.triton.stores`). Autotuned kernels take their first
configuration, after benchmarks that allocate what real ones do.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from tightfit.capture.dispatch.operators import facts
from tightfit.capture.dispatch.virtual import VirtualGpu
from tightfit.capture.patches.triton.driver import Benchmark, CompiledKernel, VirtualDriver
from tightfit.capture.patches.triton.stores import Accesses, accesses
from tightfit.errors.faults import for_torch, hands_over

_SCHEMA = "(Tensor[] read, Tensor(a!)[] written) -> ()"
_ASSUMED = (
    "Triton kernels: a launch allocates nothing; its time is taken as that of reading and writing its arguments once"
)
_ASSUMED_OF_TUNING = "Triton kernels that are autotuned: the first configuration is taken, and the 256 MiB that tuning allocates in the first step count"


class Launches:
    """Replaces what a module of triton's defines, after it has been imported."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self._gpu = gpu
        self._benchmark = Benchmark()
        self._library = torch.library.Library("triton", "FRAGMENT")
        self._operators: dict[str, OpOverload] = {}
        self._accesses: dict[int, Accesses] = {}
        self.answers: Mapping[str, Callable[[ModuleType], None]] = {
            "triton.runtime.driver": self._answer_driver,
            "triton.runtime.jit": self._answer_jit,
            "triton.testing": self._answer_testing,
        }

    def _answer_driver(self, module: ModuleType) -> None:
        module.driver.set_active(VirtualDriver(self._benchmark))

    def _answer_testing(self, module: ModuleType) -> None:
        setattr(module, "do_bench", self._benchmark)  # noqa: B010 - a module has no such attribute by its type
        setattr(module, "do_bench_cudagraph", self._benchmark)  # noqa: B010

    def _answer_jit(self, module: ModuleType) -> None:
        launches = self

        def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> CompiledKernel:
            for hook in getattr(self, "pre_run_hooks", ()):
                hook(*args, **kwargs)
            return launches.run(self, args, kwargs, grid, is_warmup=warmup)

        module.JITFunction.run = run

    @hands_over
    def run(
        self, kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any], grid: Any, *, is_warmup: bool
    ) -> CompiledKernel:
        """`JITFunction.run`: launches `kernel` unless `is_warmup`.

        Raises:
            TypeError: an argument is missing.
            ValueError: a tensor is not on the card.
        """
        # What is no parameter is an option of the compiler (`num_warps`).
        signature = _signature(kernel.fn)
        bound = signature.bind(*args, **{k: v for k, v in kwargs.items() if k in signature.parameters})
        bound.apply_defaults()
        given = dict(bound.arguments)
        if not is_warmup:
            sizes = grid(given) if callable(grid) else grid
            # Triton launches nothing for an empty grid (backends/nvidia/driver.c, `_launch`).
            if all(sizes if isinstance(sizes, Sequence) else (sizes,)):
                self._launch(kernel, given)

        def again(*values: Any, grid: Any) -> None:
            # Some releases leave out constants here, whose values are known.
            names = list(given) if len(values) == len(given) else kernel_parameters(kernel)
            self._launch(kernel, {**given, **dict(zip(names, values, strict=False))})

        return CompiledKernel(kernel.fn.__name__, again, kwargs.get("num_warps", 4))

    def _launch(self, kernel: Any, given: Mapping[str, Any]) -> None:
        found = accesses(kernel, self._accesses)
        read: list[torch.Tensor] = []
        written: list[torch.Tensor] = []
        for position, (name, value) in enumerate(given.items()):
            for tensor in _tensors(value):
                if not isinstance(tensor, FakeTensor):
                    _check_host(tensor, position)
                    continue
                if not found.is_known or name in found.written:
                    written.append(tensor)
                if not found.is_known or name in found.read:
                    read.append(tensor)
        if not (read or written):
            return
        if self._benchmark.is_running:
            self._gpu.recorder.assume(self._gpu.attribution.where(), _ASSUMED_OF_TUNING)
            return
        # As below autograd, which sees nothing of a launch either.
        with torch.no_grad():
            self._operator(kernel.fn.__name__)(read, written)

    def _operator(self, name: str) -> OpOverload:
        found = self._operators.get(name)
        if found is None:
            self._library.define(name + _SCHEMA)
            torch.library.register_fake(f"triton::{name}", _nothing, lib=self._library)
            found = self._operators[name] = getattr(torch.ops.triton, name).default
            self._gpu.handle(found, _record)
        return found


def _nothing(read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> None:
    """A launch returns nothing."""


def _record(gpu: VirtualGpu, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    read, written = args
    gpu.recorder.assume(gpu.attribution.where(), _ASSUMED)
    # With what is read alone: of what is written only a part may be read before.
    gpu.operators.note(func, facts(func), (read,), {}, written, None)
    gpu.operators.note_writes(written)


def kernel_parameters(kernel: Any) -> list[str]:
    """The names of the parameters of a kernel that are no constants."""
    constants = [a for a, kind in kernel.fn.__annotations__.items() if "constexpr" in str(kind)]
    return [name for name in _signature(kernel.fn).parameters if name not in constants]


@functools.cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of an argument: itself, in a tuple, or behind a descriptor or another element type (`base`)."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(getattr(value, "base", None), torch.Tensor):
        yield value.base


def _check_host(tensor: torch.Tensor, position: int) -> None:
    if tensor.device.type == "cpu" and tensor.numel() and not tensor.is_pinned():
        # As the launcher says it (backends/nvidia/driver.c, `getPointer`).
        raise for_torch(ValueError(f"Pointer argument (at {position}) cannot be accessed from Triton (cpu tensor?)"))
