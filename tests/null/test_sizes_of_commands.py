"""Sizes on the command line: what a number without a unit, a share and a negative size mean, for each option that takes a size."""

import json
import pickle
from pathlib import Path

import pytest

import tightfit
from tightfit.cli.arguments.sizes import budget_on
from tightfit.cli.main import run
from tightfit.devices.catalogue import find
from tightfit.errors import UsageError
from tightfit.recordings.write import write_tape
from tightfit.tape import Events, Operators, Spans, Storages, Tape

CARD = "RTX 4060"
SIZE_BYTES = 4 << 30


def tape() -> Tape:
    """A run that holds one parameter of 4 GiB in its only step."""
    return Tape(
        target="train.py",
        versions={"python": "3.11.7", "torch": "2.13.0"},
        traced_for="NVIDIA GeForce RTX 4060",
        strings=("", "step 1", "aten.empty", "net.0", "train.py:3", "float32"),
        operators=Operators.from_columns(
            {key: [0] for key in ("flops", "bytes_read", "bytes_written", "stream", "phase")}
            | {"name": [2], "module": [3], "line": [4], "dtype": [5]}
        ),
        storages=Storages.from_columns(
            {key: [SIZE_BYTES] for key in ("num_bytes", "low_bytes", "high_bytes")}
            | {"category": [0], "source": [0], "operator": [0], "stream": [0]}
        ),
        events=Events.from_columns({"kind": [0], "storage": [0], "operator": [1], "value": [0]}),
        spans=Spans.from_columns({"name": [1], "kind": [1], "begin": [0], "end": [1]}),
        assumptions=(),
        host_peak_bytes=0,
    )


@pytest.fixture
def recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same run as a recording on a card of 7.75 GiB."""
    monkeypatch.chdir(tmp_path)
    write_tape("run.pickle", tape(), find(CARD))
    return "run.pickle"


@pytest.mark.parametrize(("memory", "code"), [("5GiB", 0), ("5", 0), ("3", 1), ("60%", 0), ("40%", 1), ("100 %", 0)])
def test_a_limit_is_in_gib_or_a_share_of_the_card(recording: str, memory: str, code: int) -> None:
    assert run(["replay", recording, "--memory", memory, "--json"]) == code


def test_a_unit_that_was_assumed_is_said_on_stderr(recording: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(["replay", recording, "--memory", "3", "--json"])
    said = capsys.readouterr()
    assert said.err == "tightfit: --memory 3 has no unit; read as 3 GiB\n"
    assert json.loads(said.out)["oom"] is not None


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["replay", "run.pickle", "--memory", "-3GiB"], "--memory: '-3GiB' is negative; write a number with a unit"),
        (["replay", "run.pickle", "--memory", "4096"], "--memory: '4096' has no unit; write a number with a unit"),
        (["replay", "run.pickle", "--memory", "--json"], "--memory needs a size, such as --memory 22GiB"),
        (["replay", "plain.pickle", "--memory", "80%"], "--memory 80%: this recording does not say the GPU's capacity"),
        (["plan", "x.py", "--device", "4090", "--budget", "-3GiB"], "--budget: '-3GiB' is negative; write"),
        (["plan", "x.py", "--device", "4090", "--budget", "130%"], "--budget: '130%' is more than all of it"),
        (["run", "x.py", "--device", "4090", "--budget", "-3GiB"], "--budget: '-3GiB' is negative; write"),
        (["place", "x.csv", "--capacity", "-3GiB"], "--capacity: '-3GiB' is negative; write"),
        (["place", "x.csv", "--capacity", "9", "--alignment", "10%"], "--alignment: '10%' is a share of a size"),
    ],
)
def test_a_wrong_size_is_one_line_that_names_the_option(
    recording: str, capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    Path("x.py").write_text("raise SystemExit(3)\n")
    content = pickle.loads(Path(recording).read_bytes())
    Path("plain.pickle").write_bytes(pickle.dumps({k: v for k, v in content.items() if k != "tightfit"}, protocol=4))
    assert run(words) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"tightfit: {line}"), said.err
    assert (said.err.count("\n"), said.out) == (1, "")


def test_in_python_too(recording: str) -> None:
    assert tightfit.replay(recording, memory=5 << 30).oom is None
    assert tightfit.replay(recording, memory="60%").oom is None
    assert tightfit.replay(recording, memory=22).oom is not None
    with pytest.warns(UserWarning, match="memory '3' has no unit; read as 3 GiB"):
        assert tightfit.replay(recording, memory="3").oom is not None
    with pytest.raises(UsageError, match="budget: '-3GiB' is negative"):
        tightfit.plan("x.py:f", "4090", budget="-3GiB")


def test_a_replay_with_less_than_the_recording_begins_with_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [{"action": "alloc", "addr": 1 << 30, "size": 4096, "stream": 0, "frames": []}]
    block = {
        "address": 1 << 29,
        "size": 64 << 20,
        "requested_size": 64 << 20,
        "state": "active_allocated",
        "frames": [],
    }
    segment: dict[str, object] = {
        "address": 1 << 29,
        "total_size": 64 << 20,
        "stream": 0,
        "segment_type": "large",
        "device": 0,
    }
    other = segment | {"address": 1 << 30, "total_size": 2 << 20, "segment_type": "small"}
    left = {"address": 1 << 30, "size": 4096, "requested_size": 4096, "state": "active_allocated", "frames": []}
    rest = {
        "address": (1 << 30) + 4096,
        "size": (2 << 20) - 4096,
        "requested_size": 0,
        "state": "inactive",
        "frames": [],
    }
    other["blocks"] = [left, rest]
    file = tmp_path / "held.pickle"
    file.write_bytes(pickle.dumps({"segments": [segment | {"blocks": [block]}, other], "device_traces": [events]}))
    assert run(["replay", str(file), "--memory", "32MiB"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "before the first event: the recording begins with 64.0 MiB allocated and 64.0 MiB reserved" in said
    assert "peak allocated until then" in said


@pytest.mark.parametrize(
    ("budget", "used", "taken", "said"),
    [
        (
            "1TiB",
            None,
            None,
            "--budget 1TiB is more than a process can use of NVIDIA GeForce RTX 4060: planning for 7.75 GiB",
        ),
        (
            "7GiB",
            "3GiB",
            None,
            "--budget 7GiB is more than a process can use of NVIDIA GeForce RTX 4060 beside the 3.00",
        ),
        (
            "7GiB",
            3 << 30,
            None,
            "--budget 7GiB is more than a process can use of NVIDIA GeForce RTX 4060 beside the 3.00",
        ),
        ("80", None, None, "--budget 80 has no unit; read as 80 GiB, it is more than a process can use of NVIDIA"),
        ("4GiB", "3GiB", "4GiB", ""),
        ("100%", None, "100%", ""),
    ],
)
def test_a_budget_larger_than_the_card_is_the_card_and_said(
    budget: str, used: str | int | None, taken: str | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert budget_on(budget, CARD, used) == taken
    err = capsys.readouterr().err
    assert err.startswith(f"tightfit: {said}" if said else "") and err.count("\n") == bool(said)


@pytest.mark.parametrize("option", ["--budget", "--used", "--host"])
def test_a_size_of_two_words_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "train.py", option, "400", "MiB", "--device", "4060"]) == 2
    assert capsys.readouterr().err == f"tightfit: {option} 400 MiB: a size is one word, {option} 400MiB\n"


def test_a_second_program_is_said_to_be_an_argument_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.py", "b.py"):
        Path(name).touch()
    run(["estimate", "a.py", "b.py", "--device", "no such card"])
    assert "b.py is passed to a.py as an argument: estimate takes one program" in capsys.readouterr().err
    run(["estimate", "a.py", "--device", "no such card", "--", "b.py"])
    assert "as an argument" not in capsys.readouterr().err
