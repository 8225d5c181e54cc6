"""NVIDIA's cards through NVML (the package nvidia-ml-py), which is imported when such a source is opened."""

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

from tightfit.watch.machine.printable import printable
from tightfit.watch.machine.readings import CardReading, ProcessFacts, ProcessReading, Reading
from tightfit.watch.sources.abstract_source import AbstractSource, SourceLost
from tightfit.watch.sources.host_processes import facts_of_process


class NvmlSource(AbstractSource):
    """All cards that NVML lists. What a card or its mode has not (utilisation under MIG, power on some boards) is None."""

    name = "NVML"

    def __init__(self, library: Any = None) -> None:
        """`library` is the module `pynvml`, or what stands in for it.

        Raises:
            ImportError: nvidia-ml-py is not installed.
            SourceLost: there is no driver.
        """
        self._library = library if library is not None else importlib.import_module("pynvml")
        self._handles: list[Any] = []
        self._open()

    def read(self, now: float) -> Reading:
        if not self._handles:
            self._open()
        try:
            cards, processes = [], []
            for index, handle in enumerate(self._handles):
                card = self._card(index, handle)
                cards.append(card)
                processes += self._processes(card.uuid, handle)
        except self._library.NVMLError as error:
            # Opened anew at the next reading: a driver that was unloaded answers with handles of its own.
            self.close()
            raise SourceLost(f"NVML: {printable(str(error))}") from error
        return Reading(cards=tuple(cards), processes=tuple(processes))

    def facts(self, pid: int) -> ProcessFacts:
        return facts_of_process(pid)

    def close(self) -> None:
        if self._handles:
            self._handles = []
            self._shut_down()

    def _shut_down(self) -> None:
        with contextlib.suppress(self._library.NVMLError):
            self._library.nvmlShutdown()

    def _open(self) -> None:
        try:
            self._library.nvmlInit()
        except self._library.NVMLError as error:
            raise SourceLost(f"NVML: {printable(str(error))}") from error
        # NVML counts how often it was opened: what fails from here on is closed, or it stays loaded after the last close.
        try:
            self._driver = _text(self._library.nvmlSystemGetDriverVersion())
            count = self._library.nvmlDeviceGetCount()
            handles = [self._library.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        except self._library.NVMLError as error:
            self._shut_down()
            raise SourceLost(f"NVML: {printable(str(error))}") from error
        if not handles:
            self._shut_down()
            raise SourceLost("NVML: the driver lists no card")
        self._handles = handles

    def _card(self, index: int, handle: Any) -> CardReading:
        library = self._library
        memory = self._optional(library.nvmlDeviceGetMemoryInfo, handle)
        utilization = self._optional(library.nvmlDeviceGetUtilizationRates, handle)
        milliwatts = self._optional(library.nvmlDeviceGetPowerUsage, handle)
        return CardReading(
            uuid=_text(library.nvmlDeviceGetUUID(handle)),
            index=index,
            name=_text(library.nvmlDeviceGetName(handle)),
            vendor="NVIDIA",
            driver=self._driver,
            # Boards that share the host's memory answer with nothing, or with zero.
            total_bytes=int(memory.total) or None if memory is not None else None,
            used_bytes=int(memory.used) if memory is not None else None,
            utilization=utilization.gpu / 100 if utilization is not None else None,
            power_watts=milliwatts / 1000 if milliwatts is not None else None,
            temperature_celsius=self._optional(library.nvmlDeviceGetTemperature, handle, library.NVML_TEMPERATURE_GPU),
        )

    def _processes(self, card: str, handle: Any) -> list[ProcessReading]:
        library = self._library
        found: dict[int, int | None] = {}
        # A process that computes and draws is in both lists, with the same memory.
        for ask in (library.nvmlDeviceGetComputeRunningProcesses, library.nvmlDeviceGetGraphicsRunningProcesses):
            for process in self._optional(ask, handle) or ():
                used = process.usedGpuMemory
                known = found.get(process.pid)
                found[process.pid] = max(int(used), known or 0) if used is not None else known
        return [ProcessReading(card=card, pid=pid, used_bytes=used) for pid, used in found.items()]

    def _optional(self, ask: Callable[..., Any], *arguments: Any) -> Any:
        """The answer, or None where this card does not have it."""
        library = self._library
        try:
            return ask(*arguments)
        except (library.NVMLError_NotSupported, library.NVMLError_NoPermission, library.NVMLError_FunctionNotFound):
            return None


def _text(answer: str | bytes) -> str:
    # Bytes in versions before 11.5 of the package.
    return printable(answer.decode(errors="replace") if isinstance(answer, bytes) else answer)
