"""AMD's cards through AMD SMI (the package amdsmi of ROCm), which is imported when such a source is opened."""

import contextlib
import importlib
import sys
from collections.abc import Callable
from typing import Any

from tightfit.watch.machine.printable import printable
from tightfit.watch.machine.readings import CardReading, ProcessFacts, ProcessReading, Reading
from tightfit.watch.sources.abstract_source import AbstractSource, SourceLost
from tightfit.watch.sources.host_processes import facts_of_process


class AmdSource(AbstractSource):
    """All cards that AMD SMI lists. What it answers with an error or `N/A` is None."""

    name = "AMD SMI"

    def __init__(self, library: Any = None) -> None:
        """`library` is the module `amdsmi`, or what stands in for it.

        Raises:
            ImportError: amdsmi is not installed, or its library is not.
            SourceLost: there is no driver.
        """
        self._library = library if library is not None else _imported()
        self._handles: list[Any] = []
        self._open()

    def read(self, now: float) -> Reading:
        if not self._handles:
            self._open()
        library = self._library
        try:
            # One question without which a card says nothing; all others may have no answer.
            memory = [self._memory(handle) for handle in self._handles]
        except library.AmdSmiException as error:
            self.close()
            raise SourceLost(f"AMD SMI: {_line(error)}") from error
        cards, processes = [], []
        for index, (handle, (total, used)) in enumerate(zip(self._handles, memory, strict=True)):
            card = self._card(index, handle, total, used)
            cards.append(card)
            found = {
                int(each["pid"]): int(each["memory_usage"]["vram_mem"])
                for each in self._optional(library.amdsmi_get_gpu_process_list, handle) or ()
            }
            processes += [ProcessReading(card=card.uuid, pid=pid, used_bytes=size) for pid, size in found.items()]
        return Reading(cards=tuple(cards), processes=tuple(processes))

    def facts(self, pid: int) -> ProcessFacts:
        return facts_of_process(pid)

    def close(self) -> None:
        if self._handles:
            self._handles = []
            with contextlib.suppress(self._library.AmdSmiException):
                self._library.amdsmi_shut_down()

    def _open(self) -> None:
        try:
            self._library.amdsmi_init()
            self._handles = list(self._library.amdsmi_get_processor_handles())
        except self._library.AmdSmiException as error:
            raise SourceLost(f"AMD SMI: {_line(error)}") from error
        if not self._handles:
            raise SourceLost("AMD SMI: the driver lists no card")

    def _memory(self, handle: Any) -> tuple[int, int]:
        kind = self._library.AmdSmiMemoryType.VRAM
        # In bytes; amdsmi_get_gpu_vram_usage answers in megabytes.
        total = self._library.amdsmi_get_gpu_memory_total(handle, kind)
        return int(total), int(self._library.amdsmi_get_gpu_memory_usage(handle, kind))

    def _card(self, index: int, handle: Any, total: int, used: int) -> CardReading:
        library = self._library
        facts = self._optional(library.amdsmi_get_gpu_asic_info, handle) or {}
        driver = self._optional(library.amdsmi_get_gpu_driver_info, handle) or {}
        activity = _number((self._optional(library.amdsmi_get_gpu_activity, handle) or {}).get("gfx_activity"))
        power = self._optional(library.amdsmi_get_power_info, handle) or {}
        watts = (_number(power.get(key)) for key in ("socket_power", "current_socket_power", "average_socket_power"))
        kind, metric = library.AmdSmiTemperatureType.HOTSPOT, library.AmdSmiTemperatureMetric.CURRENT
        celsius = _number(self._optional(library.amdsmi_get_temp_metric, handle, kind, metric))
        return CardReading(
            uuid=printable(str(self._optional(library.amdsmi_get_gpu_device_uuid, handle) or f"amd-{index}")),
            index=index,
            name=printable(str(facts.get("market_name", "AMD GPU"))),
            vendor="AMD",
            driver=printable(str(driver.get("driver_version", ""))),
            total_bytes=total,
            used_bytes=used,
            utilization=activity / 100 if activity is not None else None,
            power_watts=next((each for each in watts if each is not None), None),
            # Versions before ROCm 6 answer in thousandths.
            temperature_celsius=celsius / 1000 if celsius is not None and celsius > 1000 else celsius,
        )

    def _optional(self, ask: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return ask(*arguments)
        except self._library.AmdSmiException:
            return None


def _imported() -> Any:
    """The module.

    Raises:
        ImportError: it is not installed, or the library below it is not.
    """
    try:
        # It prints what it misses, and stdout is for data.
        with contextlib.redirect_stdout(sys.stderr):
            return importlib.import_module("amdsmi")
    except (KeyError, AttributeError, OSError) as error:
        # As its wrapper fails where ROCm's library is not installed.
        raise ImportError(f"amdsmi finds no library: {error}") from error


def _number(answer: object) -> float | None:
    """The answer as a number; None for `N/A`."""
    return float(answer) if isinstance(answer, int | float) else None


def _line(error: Exception) -> str:
    return printable(" ".join(str(error).split()))
