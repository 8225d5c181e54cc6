"""`tightfit forecast`: what it prints, its exit codes, and errors of one line."""

import io
import json
import sys
from pathlib import Path

import pytest

from tightfit.cli.main import run
from tightfit.forecast.admission import Admission

GIB = 1 << 30
KEYS = {"name", "model", "median_bytes", "upper_bytes"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pods.csv"
    rows = [f"{60 * i},{(20 + i // 50 % 3) * GIB},busy\n{60 * i},{3 * GIB},idle[/]\n" for i in range(600)]
    path.write_text("time,bytes,name\n" + "".join(rows))
    return path


def test_json_has_the_keys_of_the_contract(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["forecast", str(file), "--horizon", "10", "--quantile", "0.9", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["schema"], [each["name"] for each in answer["series"]]) == (1, ["busy", "idle[/]"])
    assert all(set(each) >= KEYS and isinstance(each["upper_bytes"], int) for each in answer["series"])
    busy, idle = answer["series"]
    assert 22 * GIB >= busy["upper_bytes"] >= busy["median_bytes"] >= 20 * GIB
    assert (idle["median_bytes"], idle["upper_bytes"]) == (3 * GIB, 3 * GIB)


def test_the_table_has_a_row_for_each_series(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["forecast", str(file)]) == 0
    said = capsys.readouterr()
    heading, _, idle = said.out.splitlines()
    assert heading.split() == ["series", "now", "median", "97.5", "%", "model", "season"]
    assert idle.split() == ["idle[/]", *("3.00", "GiB") * 3, "level", "conditioned", "none"]
    assert said.err == ""


def test_a_horizon_may_be_a_time(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for horizon, samples in (("10min", 10), ("90s", 2), ("1.5h", 90), ("60", 60)):
        assert run(["forecast", str(file), "--horizon", horizon, "--json"]) == 0
        assert {each["horizon"] for each in json.loads(capsys.readouterr().out)["series"]} == {samples}


def test_series_come_from_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"time,bytes\n1,5\n1,6\n")))
    assert run(["forecast", "-", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["series"][0]["upper_bytes"] == 6
    assert (
        said.err
        == "tightfit: standard input: 1 samples have the time of another one of their series; the largest counts\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["FILE", "--quantile", "97.5"], "--quantile 97.5: write a share"),
        (["FILE", "--quantile", "nan"], "--quantile nan: write a share"),
        (["FILE", "--horizon", "0"], "must be above zero"),
        (["FILE", "--horizon", "2.5"], "a number of samples is whole"),
        (["FILE", "--horizon", "-1"], "--horizon"),
        (["FILE", "--horizon", "soon"], "write a number of samples"),
        (["FILE", "--horizon", "10000000d"], "samples of the series"),
        (["FILE.nowhere"], "there is no file"),
        ([], "file"),
    ],
)
def test_a_wrong_argument_is_one_line(
    file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(["forecast", *(word.replace("FILE", str(file)) for word in arguments)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message.lower() in said.err.lower()
    assert said.err.count("\n") == 1


def test_one_sample_has_no_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.csv"
    path.write_text("time,bytes,name\n1,5,a\n")
    assert run(["forecast", str(path), "--horizon", "10min"]) == 2
    assert "the series a has one sample" in capsys.readouterr().err
    assert run(["forecast", str(path)]) == 0
    assert "1 sample is few" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("job", "capacity", "code", "says"),
    [("10GiB", "40GiB", 0, "fits now, and over the horizon with"), ("60GiB", "80GiB", 1, "does not fit now")],
)
def test_a_job_is_admitted_beside_the_series(
    file: Path, capsys: pytest.CaptureFixture[str], job: str, capacity: str, code: int, says: str
) -> None:
    assert run(["forecast", str(file), "--job", job, "--capacity", capacity]) == code
    assert f"a job of {job.replace('GiB', '.00 GiB')} {says}" in " ".join(capsys.readouterr().out.split())
    assert run(["forecast", str(file), "--job", job, "--capacity", capacity, "--json"]) == code
    admission = json.loads(capsys.readouterr().out)["admission"]
    assert admission["fits"] == (code == 0)
    assert 23 * GIB <= admission["now_bytes"] <= admission["upper_bytes"] <= 25 * GIB


def test_a_job_that_fits_with_less_than_was_asked_for_is_said_to(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Admission(job_bytes=GIB, capacity_bytes=24 * GIB, now_bytes=20 * GIB, upper_bytes=24 * GIB, probability=0.9)
    monkeypatch.setattr("tightfit.cli.forecast.admit", lambda *_, **__: found)
    assert run(["forecast", str(file), "--job", "1GiB", "--capacity", "24GiB"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "fits now, but its probability of fitting over the horizon is 90 %, below the requested 97.5 %" in said


def test_a_job_needs_a_capacity(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["forecast", str(file), "--job", "1GiB"]) == 2
    assert "--job and --capacity go together" in capsys.readouterr().err
