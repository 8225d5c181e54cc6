"""Patches `torch.cuda` and `torch.accelerator` to answer for the simulated card.

Memory statistics come from the simulated allocator, so a script that logs `max_memory_allocated` logs the prediction.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from tightfit.capture.dispatch import one_card
from tightfit.capture.kernels.architecture import Card
from tightfit.capture.observe import streams
from tightfit.capture.observe.attribution import user_line
from tightfit.capture.observe.recorder import LiveMemory, Recorder
from tightfit.devices.device import Device
from tightfit.errors.faults import for_torch
from tightfit.errors.private_names import version_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceProperties:
    """`torch.cuda.get_device_properties`."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    max_threads_per_multi_processor: int
    L2_cache_size: int
    shared_memory_per_multiprocessor: int
    regs_per_multiprocessor: int
    shared_memory_per_block_optin: int
    shared_memory_per_block: int = 48 << 10
    warp_size: int = 32
    max_threads_per_block: int = 1024
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    gcnArchName: str = ""  # noqa: N815 - torch's name
    uuid: str = "00000000-0000-0000-0000-000000000000"


_NO_STATISTICS: dict[str, Any] = {
    f"{figure}.{pool}.{kind}": 0
    for figure in (
        *("allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes", "active_bytes"),
        *("inactive_split_bytes", "requested_bytes"),
    )
    for pool in ("all", "large_pool", "small_pool")
    for kind in ("current", "peak", "allocated", "freed")
} | {
    f"{figure}.{kind}": 0
    for figure in ("oversize_allocations", "oversize_segments")
    for kind in ("current", "peak", "allocated", "freed")
}
"""Every figure of `torch.cuda.memory_stats`; a script may ask for one that is not simulated."""


# Of torch's own recorder and of settings that are changed while a program runs.
_RECORDER_ANSWERS: Mapping[str, Callable[..., Any]] = {
    "_record_memory_history": lambda *_args, **_kwargs: None,
    "_dump_snapshot": lambda *_args, **_kwargs: None,
    "_set_allocator_settings": lambda settings: None,
}


class MemoryApi:
    """The answers about memory: from the simulated allocator, and of a card of which other processes hold `used_bytes`."""

    def __init__(self, recorder: Recorder, live: LiveMemory, device: Device, used_bytes: int) -> None:
        self.recorder = recorder
        self.live = live
        self.device = device
        self.used_bytes = used_bytes

    def memory_stats(self, device: Any = None) -> dict[str, Any]:
        """`torch.cuda.memory_stats`."""
        return _NO_STATISTICS | self.live.allocator().memory_stats()

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """`torch.cuda.reset_peak_memory_stats`."""
        self.live.allocator().reset_peaks()

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """`torch.cuda.mem_get_info`: free and total bytes of the card."""
        used = self.live.allocator().reserved_bytes + self.device.context_bytes + self.used_bytes
        return max(0, self.device.capacity_bytes - used), self.device.capacity_bytes

    def set_memory_fraction(self, fraction: float, device: Any = None) -> None:
        """`torch.cuda.set_per_process_memory_fraction`: estimates and plans are judged by it."""
        if not isinstance(fraction, float):
            raise for_torch(TypeError("Invalid type for fraction argument, must be `float`"))
        if not 0 <= fraction <= 1:
            raise for_torch(ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1"))
        self.recorder.memory_fraction = fraction
        if fraction < 1:
            self.recorder.assume(
                user_line(),
                f"the program allows torch's allocator {fraction:g} of the GPU's memory (set_per_process_memory_fraction), which limits this process",
            )

    def answers(self) -> dict[str, Callable[..., Any]]:
        """By the names of `torch.cuda.memory`."""
        return {
            "memory_stats": self.memory_stats,
            "reset_peak_memory_stats": self.reset_peak_memory_stats,
            "reset_max_memory_allocated": self.reset_peak_memory_stats,
            "reset_max_memory_cached": self.reset_peak_memory_stats,
            "reset_accumulated_memory_stats": lambda device=None: None,
            "mem_get_info": self.mem_get_info,
            "empty_cache": self.recorder.empty_cache,
            "set_per_process_memory_fraction": self.set_memory_fraction,
            "get_per_process_memory_fraction": lambda device=None: self.recorder.memory_fraction,
            "memory_snapshot": lambda *_args, **_kwargs: [],
            "get_allocator_backend": lambda: "native",
        }

    def accelerator_answers(self) -> dict[str, Callable[..., Any]]:
        """By the names of `torch.accelerator.memory`."""
        return {
            "empty_cache": self.recorder.empty_cache,
            "empty_host_cache": self.recorder.host.pinned.empty_cache,
            "memory_stats": self.memory_stats,
            "reset_peak_memory_stats": self.reset_peak_memory_stats,
            "reset_accumulated_memory_stats": lambda device=None: None,
            "memory_allocated": lambda device=None: self.memory_stats()["allocated_bytes.all.current"],
            "max_memory_allocated": lambda device=None: self.memory_stats()["allocated_bytes.all.peak"],
            "memory_reserved": lambda device=None: self.memory_stats()["reserved_bytes.all.current"],
            "max_memory_reserved": lambda device=None: self.memory_stats()["reserved_bytes.all.peak"],
            "get_memory_info": self.mem_get_info,
        }


class CudaApi:
    """The answers, as methods; `install` replaces torch's functions with them. `used_bytes` of the card are held by other processes;
    the machine has `num_cards` of them, of which this process has one."""

    def __init__(
        self,
        recorder: Recorder,
        live: LiveMemory,
        device: Device,
        card: Card,
        used_bytes: int = 0,
        num_cards: int = 1,
    ) -> None:
        self.memory = MemoryApi(recorder, live, device, used_bytes)
        self.recorder = recorder
        self.device = device
        # What the program is told must be what kernels are chosen for.
        self.card = card
        self.num_cards = num_cards
        self.properties = DeviceProperties(
            name=device.name if device.name.startswith(("NVIDIA", "AMD")) else f"NVIDIA {device.name}",
            major=device.compute_capability[0],
            minor=device.compute_capability[1],
            total_memory=device.capacity_bytes,
            multi_processor_count=device.num_multiprocessors,
            max_threads_per_multi_processor=device.max_threads_per_multiprocessor,
            L2_cache_size=device.l2_bytes,
            shared_memory_per_multiprocessor=device.shared_memory_bytes,
            # From compute capability 8.0 on 1 KiB of a multiprocessor's is the system's (CUDA C++ Programming Guide, "Compute Capabilities").
            shared_memory_per_block_optin=device.shared_memory_bytes
            - (1024 if device.compute_capability >= (8, 0) else 0),
            # A register has 4 bytes.
            regs_per_multiprocessor=device.register_file_bytes // 4,
        )

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        """`torch.cuda.get_device_capability`."""
        return self.device.compute_capability

    def get_device_name(self, device: Any = None) -> str:
        """`torch.cuda.get_device_name`."""
        return self.get_device_properties(device).name

    def get_device_properties(self, device: Any = None) -> DeviceProperties:
        """`torch.cuda.get_device_properties`."""
        one_card.check(device)
        return self.properties

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        """`torch.cuda.is_bf16_supported`."""
        return including_emulation or self.device.compute_capability >= (8, 0)

    def _answers(self) -> dict[str, Callable[..., Any]]:
        return {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "_lazy_init": lambda: None,
            # torch defers calls such as seeding until CUDA is initialised; here there is nothing to seed.
            "_lazy_call": lambda function, **_: None,
            "init": lambda: None,
            "device_count": lambda: self.num_cards,
            "current_device": lambda: 0,
            "set_device": one_card.check,
            "get_device_name": self.get_device_name,
            "get_device_capability": self.get_device_capability,
            "get_device_properties": self.get_device_properties,
            "cudart": _Runtime,
            "get_arch_list": lambda: [f"sm_{self.properties.major}{self.properties.minor}"],
            "can_device_access_peer": lambda device, peer: False,
            "is_bf16_supported": self.is_bf16_supported,
            "is_tf32_supported": lambda: self.device.compute_capability >= (8, 0),
            "synchronize": lambda device=None: streams.synchronize(self.recorder),
            "ipc_collect": lambda: None,
            "current_stream": streams.current_stream,
            "default_stream": streams.default_stream,
            "set_stream": streams.set_stream,
            "stream": streams.StreamScope,
            "utilization": lambda device=None: 100,
            "is_current_stream_capturing": lambda: False,
            "_sleep": lambda cycles: None,
            "device": _NoScope,
            "device_of": _NoScope,
            "Stream": streams.VirtualStream,
            "ExternalStream": streams.VirtualStream,
            "Event": streams.VirtualEvent,
            "_DeviceGuard": _NoScope,
            "_get_device": lambda device: torch.device("cuda", 0),
            "_exchange_device": lambda device: 0,
            "_maybe_exchange_device": lambda device: 0,
        }

    def _accelerator_answers(self) -> dict[str, Callable[..., Any]]:
        return {
            "is_available": lambda: True,
            "device_count": lambda: self.num_cards,
            "current_device_index": lambda: 0,
            "current_device_idx": lambda: 0,
            "current_accelerator": lambda check_available=False: torch.device("cuda"),
            "set_device_index": lambda device: None,
            "set_device_idx": lambda device: None,
            "current_stream": streams.current_stream,
            "set_stream": streams.set_stream,
            "synchronize": lambda device=None: streams.synchronize(self.recorder),
            "device_index": _NoScope,
        }

    def install(self) -> None:
        """Replaces torch's functions; a process that has done this is not used for anything else."""
        streams.VirtualStream.recorder = streams.VirtualEvent.recorder = self.recorder
        memory, accelerator = self.memory, torch.accelerator
        nvtx = {
            "range_push": lambda message: 0,
            "range_pop": lambda: 0,
            "mark": lambda message: None,
            "range": _no_range,
        }
        missing = [
            *_replace((torch.cuda,), self._answers()),
            *_replace((torch.cuda, torch.cuda.memory), memory.answers()),
            *_replace((torch.cuda.memory,), _RECORDER_ANSWERS),
            *_replace((torch.cuda, torch.cuda.random), _random_answers()),
            *_replace((accelerator,), _without_newer(self._accelerator_answers())),
            *_replace(_modules_of_memory(), _without_newer(memory.accelerator_answers())),
            *_replace((torch.cuda.nvtx,), nvtx),
            *_replace((torch.cuda.profiler,), {"start": lambda: None, "stop": lambda: None}),
            *_replace((torch,), {"Stream": streams.VirtualStream, "Event": streams.VirtualEvent}),
        ]
        # All of these are there in the versions that tightfit was tested on. A program cannot ask for what is not there, but what a
        # release has in its place would not answer for the virtual card: so the estimate says it.
        for name in missing:
            self.recorder.assume(
                "torch",
                f"torch {torch.__version__} has no {name}, which the virtual card answers: what replaces it is not answered",
            )
        # Libraries take the number of the stream from torch's C++ module itself; a CPU build has no such function.
        setattr(torch._C, "_cuda_getCurrentRawStream", lambda _device: streams.current_stream().cuda_stream)  # noqa: B010
        # A CPU build has None here, which scripts and libraries take for "no CUDA". Set after
        # `native.pretend_cuda_is_built`, which tells the two builds apart by it.
        torch.version.cuda = torch.version.cuda or ".".join(map(str, self.card.cuda_version))
        torch.backends.cudnn.version = lambda: self.card.cudnn_version
        torch.backends.cudnn.is_available = lambda: True
        torch.backends.cuda.is_built = lambda: True


# The first version that has a function of `torch.accelerator` or of its `memory`, where it is not the first with that module. A program cannot ask an older one.
_SINCE = {"device_index": (2, 8), "get_memory_info": (2, 10), "empty_host_cache": (2, 12)}


def _modules_of_memory() -> tuple[Any, ...]:
    return (torch.accelerator, torch.accelerator.memory) if version_of("torch") >= (2, 9) else ()


def _without_newer(answers: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    installed = version_of("torch")
    return {name: answer for name, answer in answers.items() if _SINCE.get(name, (0,)) <= installed}


def _random_answers() -> dict[str, Callable[..., Any]]:
    return {
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "seed": lambda: None,
        "seed_all": lambda: None,
        "initial_seed": lambda: 0,
        # The card's Philox state: a seed and an offset of 8 bytes each
        # (aten/src/ATen/cuda/CUDAGeneratorImpl.cpp, `get_state`). Programs save and restore it, and nothing
        # is drawn from it.
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "get_rng_state_all": lambda: [torch.zeros(16, dtype=torch.uint8)],
        "set_rng_state": lambda state, device="cuda": None,
        "set_rng_state_all": lambda states: None,
    }


class _NoScope(contextlib.nullcontext):  # type: ignore[type-arg]
    """`with torch.cuda.device(...)`: there is one device."""

    def __init__(self, device: Any = None) -> None:
        super().__init__()
        one_card.check(device)
        self.idx = 0
        self.prev_idx = 0


class _Runtime:
    """`torch.cuda.cudart()`: every call of the runtime's library succeeds and does nothing."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_args: 0


@contextlib.contextmanager
def _no_range(message: str, *_args: Any, **_kwargs: Any) -> Iterator[None]:
    yield


def _replace(modules: tuple[Any, ...], answers: Mapping[str, Callable[..., Any]]) -> list[str]:
    """Replaces the functions of these names; returns those that this release of torch lacks."""
    missing = []
    for module in modules:
        for name, answer in answers.items():
            if hasattr(module, name):
                setattr(module, name, answer)
            else:
                missing.append(f"{module.__name__}.{name}")
    return missing
