"""The instruments of a machine that has a GPU: CUDA events, the host's clock, and the driver (NVML)."""

import os
import time
from collections.abc import Callable
from typing import Any

import torch

from tightfit.calibration.instruments import Expected, Sizes
from tightfit.calibration.nvml_ctypes import Nvml, ProcessMemory
from tightfit.devices.device import Device
from tightfit.errors import UsageError
from tightfit.units import GIB, MIB

_MAX_THREADS = 64
_MOST_CYCLES = 3e9


def sizes_of_this_machine() -> Sizes:
    """Sizes large enough to be bound by what is measured, and small enough for two minutes in all on a GPU of 2018 or later."""
    return Sizes(
        num_samples=15,
        max_calls=50,
        slab_bytes=GIB // 2,
        num_host_parameters=1 << 25,
        # The cores that this process may use, not those that exist: containers and job schedulers restrict the affinity.
        num_threads=thread_counts(len(os.sched_getaffinity(0))),
        disk_bytes=GIB,
        disk_block_bytes=8 * MIB,
    )


def thread_counts(num_cores: int) -> tuple[int, ...]:
    """Powers of two up to the number of cores, and that number itself; at most 64."""
    most = min(num_cores, _MAX_THREADS)
    powers = {1 << power for power in range(most.bit_length())}
    return tuple(sorted({*powers, most}))


class CardInstruments:
    """Reads the clock and the driver of this machine. Create it before the process uses the GPU.

    Raises:
        UsageError: there is no GPU that torch can use.
    """

    is_virtual = False

    def __init__(self, find_card: Callable[[str], Device]) -> None:
        # ProcessMemory reads what is in use before torch.cuda.is_available() initialises CUDA in this process.
        nvml = Nvml.open()
        self._memory = None if nvml is None else ProcessMemory(nvml, os.getpid())
        if not torch.cuda.is_available():
            reason = "torch finds none" if torch.version.cuda else f"torch {torch.__version__} is built without CUDA"
            raise UsageError(
                f"there is no NVIDIA GPU to measure: {reason}; --virtual runs the same measurements on a simulated GPU"
            )
        self.driver = "" if nvml is None else nvml.driver_version()
        self.card = find_card(torch.cuda.get_device_name(0))
        self.sizes = sizes_of_this_machine()

    def seconds_between(self, begin: torch.cuda.Event, end: torch.cuda.Event, expected: Expected) -> float:
        """Seconds on the GPU from one event to another; waits for the second."""
        del expected
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def seconds_of(self, run: Callable[[], Any], expected: Expected) -> float:
        """Seconds on the host that `run` takes."""
        del expected
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    def keep_busy(self, seconds: float) -> None:
        """By a kernel that counts the cycles of its clock, which no GPU has more of in a second than `_MOST_CYCLES`."""
        torch.cuda._sleep(round(seconds * _MOST_CYCLES))

    def process_bytes(self) -> int:
        """GPU memory of this process by NVML; where NVML does not know, all that is not free, other processes included."""
        uuid = str(torch.cuda.get_device_properties(0).uuid)
        num_bytes = None if self._memory is None else self._memory.num_bytes(uuid)
        if num_bytes is None:
            free_bytes, total_bytes = torch.cuda.mem_get_info()
            num_bytes = total_bytes - free_bytes
        return num_bytes
