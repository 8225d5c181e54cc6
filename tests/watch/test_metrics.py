"""Metrics: names and units as OpenTelemetry and Prometheus have them, checked by promtool and by a Prometheus that scrapes them."""

import contextlib
import dataclasses
import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.hostile_text import HOSTILE_TEXTS
from tests.watch.machines import ScriptedSource
from tests.watch.served import served
from tests.watch.states import machine, process

from tightfit.units import GIB
from tightfit.watch.machine.machine_state import Episode
from tightfit.watch.metrics.exposition import OPENMETRICS, PROMETHEUS, content_type, exposition
from tightfit.watch.metrics.families import MAX_PROCESSES, families

NEEDS_PROMETHEUS = "needs {} (Debian: apt-get install prometheus)"
HOSTILE = machine(processes=tuple(process(i, GIB, command=text) for i, text in enumerate(HOSTILE_TEXTS.values())))


def promtool(text: str) -> str:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip(NEEDS_PROMETHEUS.format("promtool"))
    found = subprocess.run([program, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    return found.stdout + found.stderr


def test_the_names_of_cards_are_those_of_opentelemetry_in_base_units() -> None:
    """hw.gpu.memory.limit, .usage (By), .utilization (1), hw.gpu.utilization (1), hw.power (W), hw.temperature (Cel), hw.status."""
    lines = exposition(families(machine(1)), PROMETHEUS).splitlines()
    of_cards = [line for line in lines if line.startswith("hw_")]
    assert [line.partition("{")[0] for line in of_cards] == [
        "hw_gpu_memory_limit_bytes",
        "hw_gpu_memory_usage_bytes",
        "hw_gpu_memory_utilization_ratio",
        "hw_gpu_utilization_ratio",
        "hw_power_watts",
        "hw_temperature_celsius",
        *["hw_status"] * 2,
    ]
    assert [line.rpartition(" ")[2] for line in of_cards] == [
        str(80 * GIB),
        str(10 * GIB),
        "0.125",
        "0.5",
        "310",
        "61",
        "1",
        "0",
    ]
    assert all('hw_id="GPU-0"' in line and 'hw_type="gpu"' in line for line in of_cards)
    assert 'hw_gpu_task="general"' in of_cards[3]


def test_forecasts_alerts_and_the_state_of_the_driver_are_there() -> None:
    firing = Episode(rule="full", subject="GPU 0", message="99 %", fired_at=1.0, resolved_at=None)
    state = dataclasses.replace(
        machine(1), lost_since=5.0, episodes=(firing, dataclasses.replace(firing, subject="GPU 1", resolved_at=2.0))
    )
    text = exposition(families(state), PROMETHEUS)
    assert (
        f'tightfit_forecast_memory_bytes{{hw_id="GPU-0",horizon_seconds="3600",probability="0.975"}} {70 * GIB}\n'
        in text
    )
    assert 'tightfit_watch_alert_firing{rule="full",subject="GPU 0"} 1\n' in text
    assert "GPU 1" not in text
    assert 'tightfit_watch_driver_up{source="NVML"} 0\n' in text
    assert 'hw_state="failed"} 1\n' in text


@pytest.mark.parametrize("state", [machine(8), machine(0, ()), HOSTILE], ids=["eight cards", "none", "hostile names"])
def test_promtool_has_nothing_to_say(state: Any) -> None:
    assert promtool(exposition(families(state), PROMETHEUS)) == ""


def test_openmetrics_for_those_who_ask() -> None:
    assert content_type("text/html, */*") == content_type("") == PROMETHEUS
    assert content_type("application/openmetrics-text;version=1.0.0,text/plain;q=0.5") == OPENMETRICS
    lines = exposition(families(machine()), OPENMETRICS).splitlines()
    assert lines[-1] == "# EOF"
    assert "# UNIT hw_gpu_memory_usage_bytes bytes" in lines
    # Each unit is the end of its name, and each family comes once.
    units = [line.split()[2:] for line in lines if line.startswith("# UNIT")]
    assert all(name.endswith(f"_{unit}") for name, unit in units)
    types = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(types) == len(set(types))


def test_only_the_largest_of_many_processes_are_series() -> None:
    many = tuple(process(pid, pid * 1024) for pid in range(1, MAX_PROCESSES + 100))
    text = exposition(families(machine(1, many)), PROMETHEUS)
    assert text.count("\ntightfit_process_memory_usage_bytes{") == MAX_PROCESSES
    assert 'process_pid="1"' not in text
    assert f"tightfit_watch_processes {len(many)}\n" in text


@contextlib.contextmanager
def prometheus(folder: Path, target: str, token: str | None = None) -> Iterator[str]:
    """Debian's Prometheus, which scrapes `target` every second; yields its address."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip(NEEDS_PROMETHEUS.format("prometheus"))
    job: dict[str, Any] = {"job_name": "tightfit", "static_configs": [{"targets": [target]}]}
    if token is not None:
        job["authorization"] = {"credentials": token}
    # JSON is YAML.
    config = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": [job]}
    (folder / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    arguments = (
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={address}",
        "--log.level=error",
    )
    with subprocess.Popen([program, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield f"http://{address}"
        finally:
            process.terminate()


def asked(address: str, query: str) -> list[dict[str, Any]]:
    """What Prometheus answers to a query, waited for until it has something."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(
                f"{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}", timeout=10
            ) as answer,
        ):
            found = json.load(answer)["data"]["result"]
            if found:
                return found
        time.sleep(0.2)
    raise AssertionError(f"no answer to {query}")


def test_a_real_prometheus_scrapes_it(tmp_path: Path) -> None:
    """In OpenMetrics, which it asks for, with a token, and with a process that is named to harm."""
    source = ScriptedSource({10: 30 * GIB, 11: 3 * GIB})
    source.commands[10] = 'python "train".py \\n {x="1"} 1\\'
    token = "a secret of some length"
    with (
        served(tmp_path / "store", source, token=token) as server,
        prometheus(tmp_path, f"127.0.0.1:{server.server_address[1]}", token) as address,
    ):
        (used,) = asked(address, "hw_gpu_memory_usage_bytes")
        assert used["value"][1] == str(33 * GIB)
        assert used["metric"]["hw_model"] == "NVIDIA H100 80GB HBM3"
        (process_bytes,) = asked(address, 'tightfit_process_memory_usage_bytes{process_pid="10"}')
        assert process_bytes["metric"]["process_command_line"] == source.commands[10]
        (share,) = asked(address, "hw_gpu_memory_usage_bytes / on(hw_id) hw_gpu_memory_limit_bytes")
        assert float(share["value"][1]) == pytest.approx(33 / 80)
        (up,) = asked(address, "up")
        assert up["value"][1] == "1"
        with urllib.request.urlopen(
            f"{address}/api/v1/metadata?metric=hw_gpu_memory_usage_bytes", timeout=10
        ) as answer:
            assert json.load(answer)["data"]["hw_gpu_memory_usage_bytes"][0]["type"] == "gauge"
