"""What the NVIDIA driver says of its cards, through its own library (libnvidia-ml) and ctypes, so that no package is needed.

The structures are those of nvml.h: `nvmlMemory_t`, `nvmlProcessInfo_v2_t` (NVML API reference). A driver inside a container often knows a process by
the number that it has outside; then only the memory of the whole card can be read.
"""

import ctypes
from typing import Any, Self

_SUCCESS = 0
_TEXT_BYTES = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE
_MAX_PROCESSES = 1024
_NOT_AVAILABLE = (1 << 64) - 1


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
    """An open NVML library."""

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
        """Handles of all cards by their UUID, such as `GPU-1c2d...`."""
        count = ctypes.c_uint()
        self._library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        found = {}
        for index in range(count.value):
            handle, text = ctypes.c_void_p(), ctypes.create_string_buffer(_TEXT_BYTES)
            self._library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
            self._library.nvmlDeviceGetUUID(handle, text, ctypes.c_uint(_TEXT_BYTES))
            found[text.value.decode()] = handle
        return found

    def used_bytes(self, card: ctypes.c_void_p) -> int:
        """Memory of `card` that any process holds."""
        memory = _Memory()
        self._library.nvmlDeviceGetMemoryInfo(card, ctypes.byref(memory))
        return int(memory.used)

    def process_bytes(self, card: ctypes.c_void_p, pid: int) -> int | None:
        """Memory of `card` that process `pid` holds; None where the driver does not list it."""
        count, processes = ctypes.c_uint(_MAX_PROCESSES), (_Process * _MAX_PROCESSES)()
        answer = self._library.nvmlDeviceGetComputeRunningProcesses_v3(card, ctypes.byref(count), processes)
        if answer != _SUCCESS:
            return None
        own = [int(p.used) for p in processes[: count.value] if p.pid == pid and p.used != _NOT_AVAILABLE]
        return own[0] if own else None


class ProcessMemory:
    """How much of a card this process holds, as the driver sees it. Make it before the process touches the card.

    Where the driver does not list the process, it is what the whole card holds more than at the beginning: nothing else should run there meanwhile.
    """

    def __init__(self, nvml: Nvml, pid: int) -> None:
        self._nvml = nvml
        self._pid = pid
        self._before = {uuid: nvml.used_bytes(card) for uuid, card in nvml.cards().items()}

    def num_bytes(self, uuid: str) -> int | None:
        """Of the card `uuid`, as torch writes it (`str(torch.cuda.get_device_properties(0).uuid)`), with or without `GPU-`.

        None where NVML has no such card, as for a slice of one.
        """
        cards = self._nvml.cards()
        name = uuid if uuid in cards else f"GPU-{uuid}"
        if name not in cards:
            return None
        listed = self._nvml.process_bytes(cards[name], self._pid)
        return listed if listed is not None else self._nvml.used_bytes(cards[name]) - self._before[name]
