"""What is timed on a GPU runs without gaps, also where the host takes longer to issue it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tightfit.calibration.instruments import Expected, Sizes, seconds_on_card
from tightfit.devices.catalogue import find
from tightfit.devices.device import Device

ISSUE_SECONDS, KERNEL_SECONDS = 100e-6, 30e-6
SIZES = Sizes(
    num_samples=3,
    max_calls=50,
    slab_bytes=0,
    num_host_parameters=0,
    num_threads=(1,),
    disk_bytes=0,
    disk_block_bytes=0,
)


class SlowHost:
    """A GPU and a host with clocks of their own: a kernel begins when it was issued and the one before has ended."""

    is_virtual = True
    sizes = SIZES

    def __init__(self) -> None:
        self.card: Device = find("H200")
        self.host = self.gpu = 0.0

    def kernel(self) -> None:
        self.host += ISSUE_SECONDS
        self.gpu = max(self.gpu, self.host) + KERNEL_SECONDS

    def keep_busy(self, seconds: float) -> None:
        self.gpu = max(self.gpu, self.host) + seconds

    def seconds_of(self, run: Callable[[], Any], expected: Expected) -> float:
        began = self.host
        run()
        return self.host - began

    def seconds_between(self, begin: Any, end: Any, expected: Expected) -> float:
        return end.at - begin.at

    def process_bytes(self) -> int:
        return 0


def test_a_kernel_that_takes_longer_to_issue_is_timed_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SlowHost()

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = max(machine.gpu, machine.host)

    def synchronize() -> None:
        machine.host = max(machine.host, machine.gpu)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    samples = seconds_on_card(machine, machine.kernel, lambda _: KERNEL_SECONDS)
    assert samples == pytest.approx([KERNEL_SECONDS] * 3)
