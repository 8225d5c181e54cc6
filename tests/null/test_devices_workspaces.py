"""Workspaces of cuBLAS and cuBLASLt, as torch sizes them."""

import pytest

from tightfit.devices.calibration import Calibration
from tightfit.devices.catalogue import find
from tightfit.devices.cublas_workspaces import cublas_workspace_bytes, torch_version
from tightfit.units import MIB


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("T4", 8_519_680),
        ("A100", 8_519_680),
        ("4090", 8_519_680),
        ("H200", 32 * MIB),
        ("B200", 32 * MIB),
        ("5090", 32 * MIB),
        ("MI210", 32 * MIB),
        ("MI300X", 128 * MIB),
    ],
)
def test_defaults(name: str, num_bytes: int) -> None:
    assert cublas_workspace_bytes(find(name)) == num_bytes


def test_blackwell_had_the_small_one_before_torch_2_12() -> None:
    assert cublas_workspace_bytes(find("B200"), torch=(2, 11)) == 8_519_680
    assert cublas_workspace_bytes(find("H100"), torch=(2, 6)) == 32 * MIB


def test_a_calibration_replaces_the_default() -> None:
    card = find("H100")
    calibration = Calibration(device=card.name, cublas_bytes=1000)
    assert cublas_workspace_bytes(card, calibration=calibration) == 1000
    assert cublas_workspace_bytes(card, calibration=Calibration(device=card.name)) == 32 * MIB


def test_versions_as_torch_writes_them() -> None:
    assert torch_version("2.13.0+cu130") == (2, 13)
    assert torch_version("2.12.0a0+git123") == (2, 12)
