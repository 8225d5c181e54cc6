"""The drivers behind one interface: what they answer, what they leave out, and how they go away and come back."""

import importlib
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from tests.watch.machines import ScriptedSource

from tightfit.errors import WatchError
from tightfit.units import GIB
from tightfit.watch.sources.abstract_source import SourceLost
from tightfit.watch.sources.amd import AmdSource
from tightfit.watch.sources.host_processes import container_of_cgroup, facts_of_process
from tightfit.watch.sources.nvml import NvmlSource
from tightfit.watch.sources.open_source import open_source

HEX = "3f2a9c01b7de" + "0" * 52


class NvmlStandIn:
    """As much of pynvml as is used. `failing` names functions that raise, with the error."""

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    class NVMLError_NoPermission(NVMLError):
        pass

    class NVMLError_FunctionNotFound(NVMLError):
        pass

    NVML_TEMPERATURE_GPU = 0

    def __init__(self) -> None:
        self.failing: dict[str, Exception] = {}
        self.num_inits = self.num_shutdowns = 0

    def __getattr__(self, name: str) -> Any:
        def answer(*_: Any) -> Any:
            if name in self.failing:
                raise self.failing[name]
            if name == "nvmlInit":
                self.num_inits += 1
            if name == "nvmlShutdown":
                self.num_shutdowns += 1
            processes = [types.SimpleNamespace(pid=10, usedGpuMemory=3 * GIB)]
            return {
                "nvmlDeviceGetCount": 1,
                "nvmlSystemGetDriverVersion": "580.1",
                "nvmlDeviceGetUUID": b"GPU-0",
                "nvmlDeviceGetName": "NVIDIA H100\x1b[31m",
                "nvmlDeviceGetMemoryInfo": types.SimpleNamespace(total=80 * GIB, used=5 * GIB),
                "nvmlDeviceGetUtilizationRates": types.SimpleNamespace(gpu=87),
                "nvmlDeviceGetPowerUsage": 310_500,
                "nvmlDeviceGetTemperature": 61,
                "nvmlDeviceGetComputeRunningProcesses": [
                    *processes,
                    types.SimpleNamespace(pid=11, usedGpuMemory=None),
                ],
                "nvmlDeviceGetGraphicsRunningProcesses": processes,
            }.get(name)

        return answer


def test_nvml_answers_in_base_units_and_each_process_once() -> None:
    reading = NvmlSource(NvmlStandIn()).read(0.0)
    (card,) = reading.cards
    assert (card.total_bytes, card.used_bytes, card.utilization) == (80 * GIB, 5 * GIB, 0.87)
    assert (card.power_watts, card.temperature_celsius, card.uuid) == (310.5, 61, "GPU-0")
    assert card.name == "NVIDIA H100\\x1b[31m"
    assert {each.pid: each.used_bytes for each in reading.processes} == {10: 3 * GIB, 11: None}


def test_what_a_card_does_not_have_is_none() -> None:
    library = NvmlStandIn()
    library.failing = {
        "nvmlDeviceGetUtilizationRates": library.NVMLError_NotSupported(),
        "nvmlDeviceGetPowerUsage": library.NVMLError_NoPermission(),
        "nvmlDeviceGetMemoryInfo": library.NVMLError_NotSupported(),
    }
    (card,) = NvmlSource(library).read(0.0).cards
    assert (card.utilization, card.power_watts, card.total_bytes, card.used_bytes) == (None, None, None, None)


def test_a_driver_that_goes_is_opened_anew_when_it_is_back() -> None:
    library = NvmlStandIn()
    source = NvmlSource(library)
    library.failing = {"nvmlDeviceGetMemoryInfo": library.NVMLError("GPU is lost")}
    with pytest.raises(SourceLost, match="NVML: GPU is lost"):
        source.read(0.0)
    library.failing = {"nvmlInit": library.NVMLError("Driver Not Loaded")}
    with pytest.raises(SourceLost, match="Driver Not Loaded"):
        source.read(1.0)
    library.failing = {}
    assert source.read(2.0).cards
    assert library.num_inits == 2


@pytest.mark.parametrize("is_lost", [True, False])
def test_what_cannot_be_opened_is_closed_again(monkeypatch: pytest.MonkeyPatch, is_lost: bool) -> None:
    library = NvmlStandIn()
    if is_lost:
        library.failing = {"nvmlDeviceGetHandleByIndex": library.NVMLError("GPU is lost")}
    else:
        monkeypatch.setattr(library, "nvmlDeviceGetCount", lambda: 0, raising=False)
    for _ in range(3):
        with pytest.raises(SourceLost):
            NvmlSource(library)
    assert (library.num_inits, library.num_shutdowns) == (3, 3)


def test_the_names_are_those_of_the_package() -> None:
    library = pytest.importorskip("pynvml", reason="needs nvidia-ml-py (pip install 'tightfit[watch]')")
    source = Path(importlib.import_module("tightfit.watch.sources.nvml").__file__ or "").read_text(encoding="utf-8")
    import re

    names = set(re.findall(r"library\.((?:nvml|NVML)\w+)", source))
    assert len(names) > 12
    assert [name for name in names if not hasattr(library, name)] == []


class AmdStandIn:
    """As much of amdsmi as is used."""

    class AmdSmiException(Exception):
        pass

    AmdSmiMemoryType = types.SimpleNamespace(VRAM=0)
    AmdSmiTemperatureType = types.SimpleNamespace(HOTSPOT=1)
    AmdSmiTemperatureMetric = types.SimpleNamespace(CURRENT=0)

    def __init__(self, failing: set[str]) -> None:
        self.failing = failing

    def __getattr__(self, name: str) -> Any:
        def answer(*_: Any) -> Any:
            if name in self.failing:
                raise self.AmdSmiException("Error code:\n 10 | not supported")
            return {
                "amdsmi_get_processor_handles": ["handle"],
                "amdsmi_get_gpu_memory_total": 192 * GIB,
                "amdsmi_get_gpu_memory_usage": 7 * GIB,
                "amdsmi_get_gpu_asic_info": {"market_name": "AMD Instinct MI300X"},
                "amdsmi_get_gpu_driver_info": {"driver_version": "6.12"},
                "amdsmi_get_gpu_activity": {"gfx_activity": 40},
                "amdsmi_get_power_info": {"socket_power": "N/A", "current_socket_power": 250},
                "amdsmi_get_temp_metric": 55,
                "amdsmi_get_gpu_device_uuid": "0aff-1",
                "amdsmi_get_gpu_process_list": [{"pid": 4, "memory_usage": {"vram_mem": GIB}}],
            }.get(name)

        return answer


def test_amd_answers_in_base_units() -> None:
    reading = AmdSource(AmdStandIn(set())).read(0.0)
    (card,) = reading.cards
    assert (card.name, card.vendor, card.uuid) == ("AMD Instinct MI300X", "AMD", "0aff-1")
    assert (card.total_bytes, card.used_bytes, card.utilization) == (192 * GIB, 7 * GIB, 0.4)
    assert (card.power_watts, card.temperature_celsius) == (250, 55)
    assert [(each.pid, each.used_bytes) for each in reading.processes] == [(4, GIB)]


def test_amd_without_optional_answers_and_without_a_driver() -> None:
    library = AmdStandIn({"amdsmi_get_gpu_activity", "amdsmi_get_power_info", "amdsmi_get_gpu_device_uuid"})
    source = AmdSource(library)
    assert source.read(0.0).cards[0].utilization is None
    assert source.read(0.0).cards[0].uuid == "amd-0"
    library.failing.add("amdsmi_get_gpu_memory_total")
    with pytest.raises(SourceLost, match=r"AMD SMI: Error code: 10 \| not supported"):
        source.read(0.0)


def test_amd_without_the_library_below_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "amdsmi.py").write_text("{}['libamd_smi.so']")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ImportError, match="libamd_smi"):
        AmdSource()


def test_the_first_driver_that_answers_is_taken_and_without_any_each_says_why() -> None:
    def missing() -> NvmlSource:
        raise ImportError

    def away() -> NvmlSource:
        raise SourceLost("NVML: Driver Not Loaded")

    assert open_source({"A": missing, "B": away, "C": lambda: ScriptedSource({})}).name == "scripted"
    with pytest.raises(WatchError, match="A: not installed; NVML: Driver Not Loaded"):
        open_source({"A": missing, "B": away})


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
class TestProcesses:
    def test_of_this_machine(self) -> None:
        facts = facts_of_process(os.getpid())
        assert facts.command.split()[0] != "?"
        assert facts.started is not None
        assert facts_of_process(os.getpid()) == facts
        assert facts_of_process(2**22 + 1).command == "?"

    def test_one_that_is_named_to_harm(self) -> None:
        code = "import sys, time; print(flush=True); time.sleep(60)"
        hostile = "\x1b]0;owned\x07<script>alert(1)</script>\u202egpj"
        with subprocess.Popen([sys.executable, "-c", code, hostile], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            command = facts_of_process(process.pid).command
            process.kill()
        assert command.endswith("\\x1b]0;owned\\x07<script>alert(1)</script>\\u202egpj")
        assert command.isprintable()

    def test_one_whose_arguments_are_endless(self) -> None:
        with subprocess.Popen([sys.executable, "-c", "input()", "x" * 100_000], stdin=subprocess.PIPE) as process:
            assert len(facts_of_process(process.pid).command) <= 400
            process.kill()


@pytest.mark.parametrize(
    ("cgroup", "container"),
    [
        (f"0::/system.slice/docker-{HEX}.scope", "docker 3f2a9c01b7de"),
        (f"12:memory:/docker/{HEX}\n", "docker 3f2a9c01b7de"),
        (f"0::/machine.slice/libpod-{HEX}.scope/container", "podman 3f2a9c01b7de"),
        (f"0::/kubepods.slice/pod1.slice/cri-containerd-{HEX}.scope", "containerd 3f2a9c01b7de"),
        (f"4:cpu:/kubepods/burstable/pod7/{HEX}", "kubernetes 3f2a9c01b7de"),
        ("0::/lxc.payload.web-1/init.scope", "lxc web-1"),
        ("9:devices:/slurm/uid_1000/job_4711/step_0", "slurm 4711"),
        ("0::/system.slice/slurmstepd.scope/job_12/step_0/user", "slurm 12"),
        ("0::/user.slice/user-1000.slice/session-2.scope", ""),
        ("", ""),
    ],
)
def test_containers_are_told_from_cgroups(cgroup: str, container: str) -> None:
    assert container_of_cgroup(cgroup) == container
