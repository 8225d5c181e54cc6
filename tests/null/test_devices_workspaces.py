"""Workspaces of cuBLAS and cuBLASLt, as torch sizes them."""

import pytest

from tightfit.devices.calibration import Calibration
from tightfit.devices.catalogue import find
from tightfit.devices.workspaces import (
    cublas_workspace_bytes,
    cublaslt_workspace_bytes,
    keeps_workspaces,
    torch_version,
)
from tightfit.errors import UsageError
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


def test_cublaslt_shares_the_buffer_from_torch_2_11_to_2_14() -> None:
    assert cublaslt_workspace_bytes(find("A100"), torch=(2, 10)) == MIB
    assert cublaslt_workspace_bytes(find("A100"), torch=(2, 11)) == 0
    assert cublaslt_workspace_bytes(find("A100"), torch=(2, 15)) == MIB
    assert cublaslt_workspace_bytes(find("MI300X")) == 76 * MIB


def test_workspaces_are_kept_until_torch_2_15() -> None:
    assert keeps_workspaces(find("A100"))
    assert not keeps_workspaces(find("A100"), torch=(2, 15))
    assert keeps_workspaces(find("MI300X"), torch=(2, 15))


def test_the_environment_overrides_the_default() -> None:
    assert cublas_workspace_bytes(find("H100"), config=":4096:8") == 32 * MIB
    assert cublas_workspace_bytes(find("H100"), config=":4096:2:16:8") == 8_519_680
    assert cublas_workspace_bytes(find("H100"), config=":16:8") == 128 * 1024


def test_a_calibration_replaces_the_default_but_not_the_environment() -> None:
    card = find("H100")
    calibration = Calibration(device=card.name, cublas_bytes=1000, cublaslt_bytes=2000)
    assert cublas_workspace_bytes(card, calibration=calibration) == 1000
    assert cublaslt_workspace_bytes(card, calibration=calibration) == 2000
    assert cublas_workspace_bytes(card, calibration=calibration, config=":16:8") == 128 * 1024
    assert cublas_workspace_bytes(card, calibration=Calibration(device=card.name)) == 32 * MIB


@pytest.mark.parametrize("config", ["", "4096:8", ":4096", ":4096:8x", "none"])
def test_another_form_is_refused(config: str) -> None:
    with pytest.raises(UsageError, match="CUBLAS_WORKSPACE_CONFIG"):
        cublas_workspace_bytes(find("H100"), config=config)


def test_versions_as_torch_writes_them() -> None:
    assert torch_version("2.13.0+cu130") == (2, 13)
    assert torch_version("2.12.0a0+git123") == (2, 12)
