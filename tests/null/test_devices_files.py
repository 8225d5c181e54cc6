"""Card files and calibrations of the user's own: read whole, or refused with a line for each key that is wrong."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightfit.devices.calibration import Calibration
from tightfit.devices.card import KEYS, read_card
from tightfit.devices.catalogue import find
from tightfit.errors import UsageError
from tightfit.units import MIB

CARD = """
name = "My Card 24GB"
vendor = "nvidia"
kind = "desktop"
architecture = "ada"
isa = "sm_89"
compute_capability = [8, 9]
multiprocessors = 100
threads_per_multiprocessor = 1536
clock_mhz = 2500
memory_gib = 24
capacity_bytes = 25_000_000_000
register_file_kib = 256
shared_memory_kib = 128
l2_mib = 64
dram = "GDDR6X"
dram_gb_per_second = 900.5
link = "pcie4x8"
teraflops = { float32 = 64, bfloat16 = 128 }
source = ["my data sheet"]
"""

CALIBRATION = """
schema = 1
device = "NVIDIA H200"
[context]
num_bytes = 600_000_000
low_bytes = 590_000_000
high_bytes = 610_000_000
[workspaces]
cublas_bytes = 33_554_432
[efficiency]
matmul = 0.79
copy = 0.9
[seconds]
issue = 4e-6
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "mycard.toml"
    path.write_text(text)
    return path


def test_a_card_file_is_a_card(tmp_path: Path) -> None:
    card = find(written(tmp_path, CARD))
    assert card.name == "My Card 24GB"
    assert card.flops == {"float32": 64e12, "bfloat16": 128e12}
    assert card.dram_bytes_per_second == 900.5e9
    assert card.link.bytes_per_second == pytest.approx(15.75e9, rel=0.01)
    assert not card.context.is_measured


def test_a_card_file_may_say_what_its_context_costs(tmp_path: Path) -> None:
    card = find(str(written(tmp_path, CARD + "context_mib = [300, 320, 400]\n")))
    assert (card.context_low_bytes, card.context_bytes, card.context_high_bytes) == (300 * MIB, 320 * MIB, 400 * MIB)
    assert card.context.is_measured


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ('vendor = "nvidia"', 'vendor = "intel"', "vendor = 'intel' must be one of nvidia, amd"),
        ("memory_gib = 24", "memory_gib = '24'", "memory_gib = '24' must be a number above zero"),
        ("multiprocessors = 100", "multiprocessors = 0", "multiprocessors = 0 must be a whole number above zero"),
        ("multiprocessors = 100", "multiprocessors = true", "multiprocessors = True must be a whole number above zero"),
        ("multiprocessors = 100", "", "multiprocessors is missing; it must be a whole number above zero"),
        (
            'link = "pcie4x8"',
            'link = "pcie9x3"',
            "link = 'pcie9x3' must be 'nvlink-c2c', 'shared' or such as 'pcie4x16'",
        ),
        (
            "float32 = 64",
            "fp32 = 64",
            "teraflops = {'fp32': 64, 'bfloat16': 128} must be numbers above zero for float32",
        ),
        ("[8, 9]", "8.9", "compute_capability = 8.9 must be two whole numbers, such as [8, 9]"),
        ("dram_gb_per_second = 900.5", "bandwidth = 900", "unknown key 'bandwidth'"),
        ("l2_mib = 64", "l2_mb = 64", "unknown key 'l2_mb'; did you mean 'l2_mib'?"),
        ('["my data sheet"]', "[]", "source = [] must be a list of where the numbers are from"),
    ],
)
def test_a_wrong_key_is_named_with_its_value(tmp_path: Path, old: str, new: str, line: str) -> None:
    path = written(tmp_path, CARD.replace(old, new, 1))
    with pytest.raises(UsageError) as caught:
        find(path)
    assert any(f"{path}: {line}" in fault for fault in str(caught.value).splitlines())


def test_every_wrong_key_has_a_line_of_its_own() -> None:
    with pytest.raises(UsageError) as caught:
        read_card({}, where="card.toml")
    required = [key for key, rule in KEYS.items() if rule.is_required]
    lines = str(caught.value).splitlines()
    assert len(lines) == len(required)
    assert all(line.startswith(f"card.toml: {key} is missing") for line, key in zip(lines, required, strict=True))


@given(
    st.dictionaries(
        st.sampled_from(list(KEYS)),
        st.none() | st.text(alphabet="a1 ", max_size=3) | st.integers(max_value=0) | st.lists(st.none(), max_size=3),
    )
)
def test_no_value_of_a_wrong_kind_gets_through(values: dict[str, Any]) -> None:
    table = tomllib.loads(CARD) | values
    if all(KEYS[key].test(value) for key, value in values.items()):
        assert read_card(table, where="card.toml").name == table["name"]
    else:
        with pytest.raises(UsageError, match=r"card\.toml: "):
            read_card(table, where="card.toml")


@pytest.mark.parametrize(("text", "reason"), [("name = ", "cannot be read"), (None, "there is no file")])
def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, text: str | None, reason: str) -> None:
    path = tmp_path / "missing.toml" if text is None else written(tmp_path, text)
    with pytest.raises(UsageError, match=reason) as caught:
        find(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_has_those_named_that_are_spelled_alike(tmp_path: Path) -> None:
    near = tmp_path / "my-calibration.toml"
    near.write_text("")
    with pytest.raises(UsageError, match=rf"there is no file .*; nearest: {re.escape(str(near))}$"):
        Calibration.load(tmp_path / "my-calbration.toml")


def test_a_calibration_replaces_the_context_of_its_card(tmp_path: Path) -> None:
    calibration = Calibration.load(written(tmp_path, CALIBRATION))
    card = calibration.applied_to(find("H200"))
    assert (card.context_bytes, card.context_low_bytes, card.context_high_bytes) == (
        600_000_000,
        590_000_000,
        610_000_000,
    )
    assert card.flops == find("H200").flops
    assert calibration.efficiency == {"matmul": 0.79, "copy": 0.9}
    assert calibration.seconds == {"issue": 4e-6}
    assert (calibration.cublas_bytes, calibration.cublaslt_bytes) == (33_554_432, None)


def test_a_calibration_of_another_card_is_refused(tmp_path: Path) -> None:
    calibration = Calibration.load(written(tmp_path, CALIBRATION))
    with pytest.raises(UsageError, match="made on NVIDIA H200, not on Tesla T4"):
        calibration.applied_to(find("T4"))


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("schema = 1", "schema = 3", "schema = 3 is not one that this version reads (1 and 2)"),
        ('device = "NVIDIA H200"', "", "device = None must be the name of the card"),
        ("matmul = 0.79", "matmul = 1.2", "efficiency.matmul = 1.2 must be a fraction above 0, at most 1"),
        ("matmul = 0.79", "matmull = 0.7", "unknown key 'efficiency.matmull'"),
        ("matmul = 0.79", "matmul = 'fast'", "efficiency.matmul = 'fast' must be a number"),
        (
            "cublas_bytes = 33_554_432",
            "cublas_bytes = 1.5",
            "workspaces.cublas_bytes = 1.5 must be a whole number of bytes",
        ),
        ("issue = 4e-6", "issue = 4", "seconds.issue = 4 must be a time in seconds, from 0 to below 1"),
        ("low_bytes = 590_000_000", "", "context.low_bytes is missing"),
        (
            "low_bytes = 590_000_000",
            "low_bytes = 605_000_000",
            "context must have low_bytes <= num_bytes <= high_bytes",
        ),
        ("[seconds]", "[second]", "unknown key 'second'"),
    ],
)
def test_a_wrong_calibration_is_named(tmp_path: Path, old: str, new: str, line: str) -> None:
    path = written(tmp_path, CALIBRATION.replace(old, new, 1))
    with pytest.raises(UsageError) as caught:
        Calibration.load(path)
    assert any(fault.startswith(f"{path}: {line}") for fault in str(caught.value).splitlines())


def test_the_examples_of_the_documentation_are_valid(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "how-it-works" / "devices.md"
    card, calibration = re.findall(r"```toml\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert find(written(tmp_path, card)).name == "My Card 24GB"
    assert Calibration.load(written(tmp_path, calibration)).device == "NVIDIA H200"
