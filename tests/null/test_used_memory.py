"""Memory that other processes hold on the card: less is available, and the answer says so first."""

import ctypes
from typing import Any

import pytest
from tests.null.test_sizes_of_commands import CARD, tape

import tightfit
from tightfit.calibration.nvml_ctypes import Nvml
from tightfit.cli.arguments import used as used_option
from tightfit.cli.main import run
from tightfit.devices.catalogue import find
from tightfit.errors import UsageError
from tightfit.fit.available import used_on_own_card
from tightfit.units import GIB, MIB


class Library:
    """A driver's library with one card, of which `free_bytes` are free; None: it does not say."""

    def __init__(self, free_bytes: int | None) -> None:
        self.free_bytes = free_bytes

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 1
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        handle._obj.value = 1
        return 0

    def nvmlDeviceGetUUID(self, handle: Any, text: Any, size: Any) -> int:
        text.value = b"GPU-1"
        return 0

    def nvmlDeviceGetName(self, handle: Any, text: Any, size: Any) -> int:
        text.value = CARD.encode()
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        if self.free_bytes is None:
            return 3  # NVML_ERROR_NOT_SUPPORTED
        memory._obj.total, memory._obj.free, memory._obj.used = 8 * GIB, self.free_bytes, 8 * GIB - self.free_bytes
        return 0


def test_an_estimate_with_used_memory_has_less_available_and_says_so_first() -> None:
    plain = tightfit.estimate(tape(), CARD)
    found = tightfit.estimate(tape(), CARD, used="2GiB")
    assert found.capacity_bytes == plain.capacity_bytes - 2 * GIB
    assert found.peak == plain.peak
    assert found.assumptions[0].what == "other processes hold 2.00 GiB of its 7.75 GiB: 5.75 GiB are available"
    assert (plain.fits, tightfit.estimate(tape(), CARD, used=4 * GIB).fits) == (True, False)
    assert tightfit.estimate(tape(), CARD, used="25%").capacity_bytes == plain.capacity_bytes * 3 // 4
    assert tightfit.estimate(tape(), CARD, used=0).assumptions == ()


@pytest.mark.parametrize("used", ["8GiB", "100%"])
def test_where_nothing_would_be_left_it_is_refused(used: str) -> None:
    with pytest.raises(
        UsageError, match=r"a process can have 7.75 GiB of NVIDIA GeForce RTX 4060, so nothing would be"
    ):
        tightfit.estimate(tape(), CARD, used=used)


@pytest.mark.parametrize(
    ("free_bytes", "used_bytes"),
    [
        (6 * GIB, find(CARD).capacity_bytes - 6 * GIB),
        (find(CARD).capacity_bytes - 10 * MIB, 0),  # the catalogue and this driver need not agree to the byte
        (9 * GIB, 0),
        (None, 0),
    ],
)
def test_what_the_driver_says_of_the_own_card(free_bytes: int | None, used_bytes: int) -> None:
    assert used_on_own_card(find(CARD), Nvml(Library(free_bytes))) == used_bytes
    assert used_on_own_card(find(CARD), None) == 0


def test_the_own_card_is_asked_unless_used_is_given_and_no_other_card_is(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tape().save("run.npz")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Library(3 * GIB))
    monkeypatch.setattr("tightfit.cli.estimate.own_card", lambda _: "NVIDIA GeForce RTX 4060")
    assert run(["estimate", "run.npz"]) == 1
    said = capsys.readouterr()
    assert said.err == (
        "tightfit: NVIDIA GeForce RTX 4060: other processes hold 4.75 GiB of its 7.75 GiB: 3.00 GiB are available"
        " (--used 0 counts on all of it)\n"
    )
    assert "other processes hold 4.75 GiB" in said.out
    assert run(["estimate", "run.npz", "--used", "0"]) == run(["estimate", "run.npz", "--device", CARD]) == 0
    assert capsys.readouterr().err == ""
    assert used_option.used_now(None, CARD, is_own=False) is None
