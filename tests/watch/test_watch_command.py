"""`tightfit watch`: what it prints, who reads the machine when there are two, how it ends."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tightfit.cli.main import run

KEYS = {"schema", "host", "time", "source", "interval_seconds", "cards", "processes", "containers", "alerts", "notes"}
CARD_KEYS = {
    *("uuid", "index", "name", "vendor", "driver", "total_bytes", "used_bytes", "utilization", "power_watts"),
    *("temperature_celsius", "forecast"),
}
PROCESS_KEYS = {
    *("gpu", "card", "pid", "started", "user", "command", "container", "used_bytes", "allocated_bytes"),
    *("reserved_bytes", "forecast"),
}
FORECAST_KEYS = {
    *(
        "made_at",
        "horizon_seconds",
        "quantile",
        "median_bytes",
        "upper_bytes",
        "growth_bytes_per_hour",
        "model",
        "note",
    ),
}


@contextmanager
def watch(*arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """`tightfit watch` in a process of its own, which is killed in the end."""
    program = [sys.executable, "-m", "tightfit", "watch", *map(str, arguments)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_json_has_the_keys_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["watch", "--simulate", "2x2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (set(answer), answer["schema"]) == (KEYS, 1)
    assert [card["index"] for card in answer["cards"]] == [0, 1]
    assert all(set(card) == CARD_KEYS and set(card["forecast"]) == FORECAST_KEYS for card in answer["cards"])
    assert answer["processes"]
    assert all(set(process) == PROCESS_KEYS for process in answer["processes"])


def test_without_a_terminal_it_is_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["watch", "--simulate", "1x2"]) == 0
    said = capsys.readouterr()
    heading, card, _, of_processes, *processes = said.out.splitlines()
    assert heading.split() == ["GPU", "name", "memory", "used", "busy", "power", "temp.", "next", "hour"]
    assert card.split()[:3] == ["0", "Simulated", "80GB"]
    assert of_processes.split()[:3] == ["GPU", "PID", "user"]
    assert 1 <= len(processes) <= 2
    assert said.err == ""


def test_a_machine_without_cards_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tightfit.watch.sources.open_source._DRIVERS", {})
    assert run(["watch", "--once", "--store", "/nonexistent"]) == 3
    assert "no GPU to watch on this machine" in capsys.readouterr().err


def test_an_interval_that_is_none_is_called_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["watch", "--interval", "often"]) == 2
    assert capsys.readouterr().err == "tightfit: --interval often: write a time from 1s to 1h\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--simulate", "8"],
        ["--interval", "0.5s"],
        ["--interval", "10"],
        ["--interval", "2h"],
        ["--interval", "-1s"],
        ["--quantile", "1"],
        ["--job", "much"],
        ["--alerts", "/no/such/file.toml"],
        ["--web", "--bind", "0.0.0.0"],
        ["--web", "--token", "short"],
        ["--web", "--port", "70000"],
        ["--web", "--bind", "no such host"],
    ],
)
def test_what_is_wrong_is_a_usage_error_of_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["watch", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize(("job", "code"), [("1GiB", 0), ("79GiB", 1)])
def test_the_exit_code_says_whether_a_job_fits(job: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["watch", "--simulate", "1x2", "--job", job]) == code
    assert f"GPU 0: a job of {job[:-3]}.00 GiB" in capsys.readouterr().out


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_the_page_is_served_until_a_signal(tmp_path: Path) -> None:
    with watch("--web", "--port", "0", "--simulate", "1x2", "--store", tmp_path) as process:
        assert process.stderr is not None
        process.stderr.readline()
        url = process.stderr.readline().split()[-1]
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"{url}api/state.json", timeout=10) as answer:
                    assert json.load(answer)["source"]["name"] == "simulated"
                break
            except urllib.error.HTTPError:
                # Before the first reading.
                assert time.monotonic() < deadline
                time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_two_agents_are_one_reader_and_the_second_goes_on_when_the_first_is_killed(tmp_path: Path) -> None:
    arguments = ("--simulate", "1x3", "--store", tmp_path / "store")
    with watch("--agent", *arguments) as first:
        assert first.stderr is not None
        assert "the agent reads" in first.stderr.readline()
        with watch("--agent", *arguments) as second:
            assert second.stderr is not None
            assert f"waits for process {first.pid}" in second.stderr.readline()
            answer = subprocess.run(
                [sys.executable, "-m", "tightfit", "watch", "--json", *map(str, arguments)],
                capture_output=True,
                text=True,
                check=True,
            )
            assert time.time() - json.loads(answer.stdout)["time"] < 30
            first.kill()
            first.wait()
            lock = tmp_path / "store" / "agent.lock"
            deadline = time.monotonic() + 60
            while lock.read_text() != f"{second.pid}\n":
                assert time.monotonic() < deadline
                time.sleep(0.1)
            second.send_signal(signal.SIGTERM)
            assert second.wait(timeout=60) == 0
    assert os.path.getsize(tmp_path / "store" / "history.sqlite") > 0
