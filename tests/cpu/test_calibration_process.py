"""What the process that measures a card takes it for."""

import pytest

from tightfit.calibration.card_process import measured_card
from tightfit.devices.catalogue import find
from tightfit.errors import UnknownDevice, UsageError


def test_the_card_is_the_one_that_the_driver_reports() -> None:
    assert measured_card(None, "NVIDIA H200") is find("H200")
    assert measured_card("h200", "NVIDIA H200") is find("H200")
    assert measured_card("RTX 4090", "A card of next year 9999") is find("RTX 4090")
    with pytest.raises(UsageError, match="the GPU of this machine is NVIDIA H200"):
        measured_card("RTX 4090", "NVIDIA H200")
    with pytest.raises(UnknownDevice):
        measured_card(None, "A card of next year 9999")
