"""`torch.cuda.cudart()` of the virtual card: memory that the program registers with the driver is page-locked from then on."""

from typing import Any

import torch

from tightfit.capture.observe.host_storages import HostStorages
from tightfit.capture.replace import replace


class VirtualRuntime:
    """Every call of the runtime's library succeeds and, but for registering memory, does nothing."""

    def __init__(self, host: HostStorages) -> None:
        self._host = host

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:  # noqa: N802 - the library's name
        """Page-locks `size` bytes of the program's memory."""
        self._host.register(pointer, size)
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802 - the library's name
        """Undoes `cudaHostRegister`."""
        self._host.unregister(pointer)
        return 0

    def __getattr__(self, name: str) -> Any:
        return lambda *_args: 0


def install(host: HostStorages) -> None:
    """Replaces `torch.cuda.cudart`."""
    replace(torch.cuda, cudart=lambda: VirtualRuntime(host))
