"""Readings of the NVIDIA driver through its own library (libnvidia-ml) and ctypes, so that no package is needed.

The structures are those of nvml.h: `nvmlMemory_t`, `nvmlProcessInfo_v2_t` (NVML API reference). In a container the driver often lists a process
by its PID outside of the container; then only the memory of the whole GPU can be read.
"""

import ctypes
from typing import Any, Self

_SUCCESS = 0
_TEXT_BYTES = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE
_MAX_PROCESSES = 1024
# NVML_VALUE_NOT_AVAILABLE, which the driver reports for processes whose memory it may not show (under WDDM, for one).
_NOT_AVAILABLE = (1 << 64) - 1


# nvmlMemory_t, version 1: `used` includes what the driver reserves for itself.
class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class Nvml:
    """The loaded NVML library."""

    def __init__(self, library: Any) -> None:
        self._library = library

    @classmethod
    def open(cls, name: str = "libnvidia-ml.so.1") -> Self | None:
        """NVML, or None where the library is not installed or finds no driver."""
        try:
            library = ctypes.CDLL(name)
        except OSError:
            return None
        return cls(library) if library.nvmlInit_v2() == _SUCCESS else None

    def driver_version(self) -> str:
        """Such as `580.159.03`; empty where the driver does not say."""
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        self._library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(_TEXT_BYTES))
        return text.value.decode()

    def cards(self) -> dict[str, ctypes.c_void_p]:
        """Handles of all GPUs by their UUID, such as `GPU-1c2d...`."""
        count = ctypes.c_uint()
        self._library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        found = {}
        for index in range(count.value):
            handle, text = ctypes.c_void_p(), ctypes.create_string_buffer(_TEXT_BYTES)
            self._library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
            self._library.nvmlDeviceGetUUID(handle, text, ctypes.c_uint(_TEXT_BYTES))
            found[text.value.decode()] = handle
        return found

    def name(self, card: ctypes.c_void_p) -> str:
        """Such as `NVIDIA H200`; empty where the driver does not say."""
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        self._library.nvmlDeviceGetName(card, text, ctypes.c_uint(_TEXT_BYTES))
        return text.value.decode()

    def used_bytes(self, card: ctypes.c_void_p) -> int:
        """Used memory of `card`, of all processes."""
        memory = _Memory()
        self._library.nvmlDeviceGetMemoryInfo(card, ctypes.byref(memory))
        return int(memory.used)

    def free_bytes(self, card: ctypes.c_void_p) -> int | None:
        """Memory of `card` that no process holds; None where the driver does not say, as on boards that share the host's memory."""
        memory = _Memory()
        answer = self._library.nvmlDeviceGetMemoryInfo(card, ctypes.byref(memory))
        return int(memory.free) if answer == _SUCCESS and memory.total else None

    def process_bytes(self, card: ctypes.c_void_p, pid: int) -> int | None:
        """Memory of `card` that process `pid` uses; None where the driver does not list it."""
        count, processes = ctypes.c_uint(_MAX_PROCESSES), (_Process * _MAX_PROCESSES)()
        # _v3 fills nvmlProcessInfo_v2_t, whose two last fields name the MIG instance.
        answer = self._library.nvmlDeviceGetComputeRunningProcesses_v3(card, ctypes.byref(count), processes)
        if answer != _SUCCESS:
            return None
        own = [int(p.used) for p in processes[: count.value] if p.pid == pid and p.used != _NOT_AVAILABLE]
        return own[0] if own else None


class ProcessMemory:
    """GPU memory of this process, as the driver reports it. Create it before the process uses the GPU.

    Where the driver does not list the process, it is the growth of the whole GPU's used memory since then, so nothing else should run on it.
    """

    def __init__(self, nvml: Nvml, pid: int) -> None:
        self._nvml = nvml
        self._pid = pid
        self._before = {uuid: nvml.used_bytes(card) for uuid, card in nvml.cards().items()}

    def num_bytes(self, uuid: str) -> int | None:
        """GPU memory of this process on the GPU `uuid`, in torch's form (`str(torch.cuda.get_device_properties(0).uuid)`), with or without `GPU-`.

        None where NVML has no such device, as for a MIG slice.
        """
        cards = self._nvml.cards()
        # torch's uuid lacks the prefix that NVML writes. A MIG slice has a UUID of its own, which is no device of NVML's list.
        name = uuid if uuid in cards else f"GPU-{uuid}"
        if name not in cards:
            return None
        listed = self._nvml.process_bytes(cards[name], self._pid)
        return listed if listed is not None else self._nvml.used_bytes(cards[name]) - self._before[name]
