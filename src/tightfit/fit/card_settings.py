"""What is known of the GPU that a workload is for: its figures, the allocator's settings on it, what of it is in use, and the margin that is kept."""

import dataclasses
import os
from pathlib import Path

from tightfit.allocator.settings import AllocatorSettings, settings_of_environment
from tightfit.devices.calibration import Calibration
from tightfit.devices.catalogue import find
from tightfit.devices.device import Device
from tightfit.errors import UsageError
from tightfit.fit.available import Used, used_bytes_of, without_used
from tightfit.simulate.estimate import MARGINS
from tightfit.units import MIB, to_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CardSettings:
    """A GPU by the `name` that it was given; `empty` is that GPU as measured, with nothing on it, of which other processes hold `used_bytes`."""

    name: str
    empty: Device
    used_bytes: int
    settings: AllocatorSettings
    calibration: Calibration | None
    margin: str

    @classmethod
    def of(
        cls,
        device: str,
        *,
        alloc_conf: str | None = None,
        calibration: str | os.PathLike[str] | None = None,
        used: Used = None,
        margin: str | int = "safe",
    ) -> "CardSettings":
        """The settings that are written so.

        Raises:
            UsageError: no such device or setting, other processes use all of it, or a calibration that cannot be read or was made on another card.
        """
        card, settings, end = find(device), allocator_settings(alloc_conf), margin_named(margin)
        measured = None if calibration is None else Calibration.load(Path(calibration))
        card = card if measured is None else measured.applied_to(card)
        return cls(
            name=device,
            empty=card,
            used_bytes=used_bytes_of(card, used),
            settings=settings,
            calibration=measured,
            margin=end,
        )

    @property
    def card(self) -> Device:
        """The GPU with the capacity that is left."""
        return without_used(self.empty, self.used_bytes)

    def budget_bytes(self, budget: str | int | None) -> int:
        """The bytes of the GPU that `budget` means, all of it where that is None; what is in use is not taken off.

        Raises:
            UsageError: it is no size, or none at all.
        """
        whole_bytes = self.empty.capacity_bytes
        num_bytes = whole_bytes if budget is None else to_bytes(budget, "budget", whole_bytes=whole_bytes)
        if not num_bytes > 0:
            raise UsageError("the budget is 0; give the GPU memory that the process may use, such as 22GiB")
        # No context of CUDA is as small: it was meant as GiB, which the command line takes such a number for.
        if isinstance(budget, int) and num_bytes < MIB:
            raise UsageError(f"budget={budget} is bytes: write budget='{budget}GiB', or all the bytes")
        return num_bytes


def margin_named(text: str | int) -> str:
    """The margin by that name, one of `tightfit.simulate.estimate.MARGINS`.

    Raises:
        UsageError: there is none.
    """
    if str(text) not in MARGINS:
        raise UsageError(
            f"--margin {text}: give 0 (the lower end of the peak's range has to fit), likely (the likely peak) or safe (the upper end)"
        )
    return str(text)


def allocator_settings(alloc_conf: str | None = None) -> AllocatorSettings:
    """The settings that `alloc_conf` writes, or else those of the environment, as torch would read them.

    Raises:
        UsageError: torch would not take them.
    """
    if alloc_conf is None:
        alloc_conf = settings_of_environment()
    return AllocatorSettings.parse(alloc_conf)
