"""What a calibration of schema 2 holds, how it is written, and what of it an estimate and the cost of work read."""

import ctypes
import dataclasses
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightfit.cost.copies import copy_seconds, link_bytes_per_second
from tightfit.cost.efficiency import efficiency_of
from tightfit.devices.calibration import Calibration
from tightfit.devices.calibration_file import to_toml
from tightfit.devices.catalogue import find
from tightfit.errors import UsageError
from tightfit.units import GIB, MIB

CONTENT: dict[str, Any] = {
    "schema": 2,
    "device": "NVIDIA H200",
    "virtual": False,
    "made": {"date": "2026-11-20", "driver": "580.1"},
    "context": {
        "num_bytes": 600 * MIB,
        "low_bytes": 450 * MIB,
        "high_bytes": 700 * MIB,
        "init_bytes": 450 * MIB,
        "cublas_bytes": 80 * MIB,
        "cublaslt_bytes": 30 * MIB,
        "cudnn_bytes": 40 * MIB,
    },
    "efficiency": {"matmul": 0.7, "copy": 0.9, "bfloat16": {"matmul": 0.75}},
    "link": {"to_card_registered_bytes_per_second": 50e9, "latency_seconds": 1e-5},
    "allocation": {"sizes_bytes": [MIB, GIB], "allocate_seconds": [1e-4, 2e-4], "free_seconds": [1e-4, 3e-4]},
    "host": {"adamw_threads": [1.0, 8.0], "adamw_parameters_per_second": [1e9, 5e9]},
    "measured": [
        {"name": "launch", "unit": "s", "median": 2e-6, "low": 1e-6, "high": 3e-6, "num_samples": 15},
    ],
}


def read(**changes: Any) -> Calibration:
    return Calibration.from_content(CONTENT | changes, where="file")


def test_a_file_is_read_as_it_was_written() -> None:
    assert tomllib.loads(to_toml(CONTENT, remark="made by a test")) == CONTENT


values = st.one_of(
    st.booleans(),
    st.integers(-(2**60), 2**60),
    st.text(max_size=20),
    st.floats(1e-9, 1e15).map(lambda value: float(f"{value:.6g}")),
)
names = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
tables = st.dictionaries(names, values | st.lists(values, min_size=1, max_size=4), max_size=4)


@given(st.dictionaries(names, values | tables | st.lists(tables, min_size=1, max_size=3), max_size=5))
def test_any_tables_survive_the_file(content: dict[str, Any]) -> None:
    assert tomllib.loads(to_toml(content)) == content


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"virtual": "yes"}, "virtual = 'yes' must be true or false"),
        ({"efficiency": {"bfloat16": {"matmul": 2}}}, "efficiency.bfloat16.matmul = 2 must be a fraction above 0"),
        ({"efficiency": {"bfloat16": {"mm": 0.5}}}, "unknown key 'efficiency.bfloat16.mm'"),
        ({"link": {"to_card": 1.0}}, "unknown key 'link.to_card'"),
        ({"overlap": {"product_beside_to_card": -1}}, "overlap.product_beside_to_card = -1 must be a number above 0"),
        (
            {"allocation": {"sizes_bytes": [1], "free_seconds": [0.1, 0.2]}},
            "allocation: sizes_bytes, free_seconds must",
        ),
        ({"made": {"date": 3}}, "made must be a table of texts"),
        ({"measured": [{"name": "x"}]}, "measured[0] must have name, unit"),
        ({"measured": {}}, "measured must be a list of tables"),
        ({"disk": {"num_threads": 0.5}}, "disk.num_threads = 0.5 must be a whole number above 0"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(**changes)
    assert str(caught.value).startswith(f"file: {line}")


def test_schema_1_has_fewer_tables() -> None:
    with pytest.raises(UsageError, match="unknown key 'link'; the tables are context, workspaces, efficiency, seconds"):
        Calibration.from_content({"schema": 1, "device": "x", "link": {}}, where="file")


def test_a_context_is_as_large_as_the_libraries_that_are_used() -> None:
    card, found = find("H200"), read()
    assert found.applied_to(card).context_bytes == 600 * MIB
    assert found.applied_to(card, ()).context_bytes == 450 * MIB
    assert found.applied_to(card, ("cublas", "cublaslt")).context_bytes == 560 * MIB
    assert found.applied_to(card, ("cublas",)).context_high_bytes == 700 * MIB
    whole = dataclasses.replace(found, context_parts={})
    assert whole.applied_to(card, ()).context_bytes == 600 * MIB


def test_a_simulated_calibration_is_refused() -> None:
    with pytest.raises(UsageError, match="simulated, not measured; run tightfit calibrate on a machine with the card"):
        read(virtual=True).applied_to(find("H200"))


def test_efficiencies_are_by_type_where_they_were_measured_so() -> None:
    found = efficiency_of(find("H200"), read())
    assert found.of_flops["matmul", "bfloat16"] == 0.75
    assert found.of_flops["elementwise", "bfloat16"] == 0.75
    assert found.of_flops["matmul", "float32"] == 0.7
    assert found.of_bandwidth["matmul"] == 0.9


def test_copies_take_the_measured_rate_of_their_way() -> None:
    card, found = find("H200"), read()
    assert copy_seconds(10**9, card, calibration=found) == pytest.approx(0.02 + 1e-5)
    back = link_bytes_per_second(card.link, to_card=False, calibration=found)
    assert back == link_bytes_per_second(card.link, to_card=False)


class Driver:
    """A stand-in for libnvidia-ml with one card, on which some process holds 7 GiB."""

    def __init__(self, *processes: tuple[int, int]) -> None:
        self.processes = processes
        self.used = 7 * GIB

    def nvmlSystemGetDriverVersion(self, text: Any, size: ctypes.c_uint) -> int:
        text.value = b"580.1"
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 1
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, handle: Any) -> int:
        handle._obj.value = 42
        return 0

    def nvmlDeviceGetUUID(self, handle: ctypes.c_void_p, text: Any, size: ctypes.c_uint) -> int:
        text.value = b"GPU-abc"
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, memory: Any) -> int:
        memory._obj.used = self.used
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: ctypes.c_void_p, count: Any, processes: Any) -> int:
        count._obj.value = len(self.processes)
        for place, (pid, used) in zip(processes, self.processes, strict=False):
            place.pid, place.used = pid, used
        return 0


def test_the_driver_is_asked_for_the_process() -> None:
    from tightfit.calibration.nvml_ctypes import Nvml, ProcessMemory

    driver = Driver((1, GIB), (77, 3 * GIB))
    assert Nvml(driver).driver_version() == "580.1"
    assert ProcessMemory(Nvml(driver), 77).num_bytes("abc") == 3 * GIB
    assert ProcessMemory(Nvml(driver), 77).num_bytes("GPU-abc") == 3 * GIB
    assert ProcessMemory(Nvml(driver), 77).num_bytes("a slice") is None


def test_a_process_that_the_driver_does_not_list_is_what_the_card_holds_more() -> None:
    from tightfit.calibration.nvml_ctypes import Nvml, ProcessMemory

    driver = Driver((1, GIB))
    memory = ProcessMemory(Nvml(driver), 77)
    driver.used += 2 * GIB
    assert memory.num_bytes("abc") == 2 * GIB


def test_no_library_is_no_driver() -> None:
    from tightfit.calibration.nvml_ctypes import Nvml

    assert Nvml.open("libno-such-library.so") is None
