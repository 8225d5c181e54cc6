"""`tightfit doctor` and `tightfit diff` on workloads that are traced, end to end: what is planted is found, what is wrong is one line."""

import json
from pathlib import Path

import pytest

from tightfit.cli.main import run

WORKLOAD = """\
import torch


class Layer(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.wide, self.narrow = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.narrow(torch.relu(self.wide(x)))


def workload(batch_size=512, leaks=False, keeps=False):
    layers = torch.nn.Sequential(*(Layer(256) for _ in range(4))).cuda()
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    losses, seen = [], None
    while True:
        output = layers(torch.randn(batch_size, 256, device="cuda"))
        seen = output * torch.ones(64, 1, 1, device="cuda") if keeps else None
        loss = output.square().mean()
        if leaks:
            losses.append(output.detach() + 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
"""
LEAKING_LINE = 1 + WORKLOAD.splitlines().index("            losses.append(output.detach() + 1)")
KEEPING_LINE = 1 + next(at for at, line in enumerate(WORKLOAD.splitlines()) if "seen = output *" in line)


@pytest.fixture(scope="module")
def tapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the workload and its runs as it is, leaking, and keeping an output."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "work.py").write_text(WORKLOAD)
    for name in ("plain", "leaks", "keeps"):
        arguments = [] if name == "plain" else ["-p", f"{name}=True"]
        command = ["estimate", f"{folder / 'work.py'}:workload", *arguments, "--device", "4090", "--steps", "4"]
        assert run([*command, "--save-tape", str(folder / f"{name}.npz"), "--json"]) == 0
    return folder


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    """What a command prints as JSON."""
    capsys.readouterr()
    assert run([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_traced_workload_is_diagnosed_at_once(tapes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "doctor", f"{tapes / 'work.py'}:workload", "-p", "batch_size=1024", "--device", "4090")
    assert (found["schema"], found["origin"]) == (1, "estimate")
    assert sum(found["at_peak"].values()) == found["peak_allocated_bytes"]
    checkpointing = next(remedy for remedy in found["remedies"] if "checkpoint" in remedy["what"])
    assert checkpointing["adds_seconds"] > 0
    assert checkpointing["saves_bytes"] > 0


def test_the_peaks_are_those_of_the_estimate(tapes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tape = str(tapes / "plain.npz")
    peak = answer(capsys, "estimate", tape, "--device", "4090")["peak"]
    found = answer(capsys, "doctor", tape)
    assert found["peak_allocated_bytes"] == peak["allocated_bytes"]
    assert found["peak_reserved_bytes"] == peak["reserved_bytes"]


def test_a_leak_is_named_with_its_line(tapes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (leak,) = answer(capsys, "doctor", str(tapes / "leaks.npz"))["growth"]
    assert Path(leak["where"]).name == f"work.py:{LEAKING_LINE}"
    assert leak["bytes_per_step"] == 512 * 256 * 4
    assert answer(capsys, "doctor", str(tapes / "plain.npz"))["growth"] == []


def test_a_traced_leak_is_named_with_its_holder(tapes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = [f"{tapes / 'work.py'}:workload", "--device", "4090", "--steps", "4"]
    (leak,) = answer(capsys, "doctor", *target, "-p", "leaks=True")["leaks"]
    assert (leak["cause"], leak["holder"]["path"]) == ("Python container", "workload.losses[-1]")
    assert leak["holder"]["root"].startswith("local variable of workload() at ")
    assert run(["doctor", *target, "-p", "leaks=True"]) == 0
    assert "held by workload.losses[-1] (local variable of workload()" in " ".join(capsys.readouterr().out.split())


def test_the_statement_that_keeps_what_grows_is_quoted(tapes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, *_ = answer(capsys, "doctor", str(tapes / "leaks.npz"))["remedies"]
    assert Path(first["where"]).name == f"work.py:{LEAKING_LINE}"
    assert first["what"].startswith("`losses.append(output.detach() + 1)` keeps a tensor of every step: `.cpu()`")
    assert first["saves_bytes"] == 3 * 512 * 256 * 4  # of four steps, one is the last, whose peak comes before its own


def test_an_output_that_is_held_into_the_next_step_is_free_to_let_go(
    tapes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(capsys, "doctor", str(tapes / "keeps.npz"))["remedies"]
    first = next(remedy for remedy in found if "`del` the variable" in remedy["what"])
    assert Path(first["where"]).name == f"work.py:{KEEPING_LINE}"
    assert first["adds_seconds"] == 0


def test_diff_finds_the_leak(tapes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "diff", str(tapes / "plain.npz"), str(tapes / "leaks.npz"))
    assert found["matched_by"] == "lines"
    assert Path(found["partings"][0]["b"]["where"]).name == f"work.py:{LEAKING_LINE}"
    assert found["partings"][0]["a"] is None
    assert {Path(change["b_where"]).name for change in found["changes"] if change["kind"] == "new"} >= {
        f"work.py:{LEAKING_LINE}"
    }


def test_an_estimate_and_the_recording_that_it_writes_are_the_same_run(
    tapes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tape, recording = str(tapes / "plain.npz"), str(tapes / "plain.pickle")
    answer(capsys, "estimate", tape, "--device", "4090", "--save-recording", recording)
    found = answer(capsys, "diff", tape, recording)
    assert (found["changes"], found["partings"]) == ([], [])
    assert found["a"]["peak_reserved_bytes"] == found["b"]["peak_reserved_bytes"]
    assert answer(capsys, "doctor", recording)["remedies"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["doctor", "gone.pickle"], 2, "there is no file gone.pickle"),
        (["doctor", "gone.npz"], 2, "there is no file gone.npz"),
        (["doctor", "work.pickle"], 3, "work.pickle is not a memory recording"),
        (["doctor", "work.npz"], 3, "work.npz is not a tape"),
        (["doctor", "plain.npz", "-p", "batch_size=3"], 2, "is a finished run"),
        (["doctor", "plain.npz", "--largest-batch"], 2, "it takes no --largest-batch"),
        (["diff", "plain.npz", "plain.npz", "--steps", "9"], 2, "it takes no --steps"),
        (["doctor", "plain.npz", "--device", "no such card"], 2, "no such card"),
        (["doctor", "plain.npz", "--seconds", "0"], 2, "is not a valid search time"),
        (["diff", "plain.npz", "gone.pickle"], 2, "there is no file gone.pickle"),
        (["diff", "plain.npz"], 2, ""),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    tapes: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    says: str,
) -> None:
    monkeypatch.chdir(tapes)
    Path("work.pickle").write_text(WORKLOAD)
    Path("work.npz").write_text(WORKLOAD)
    capsys.readouterr()
    assert run(arguments) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("tightfit: ")
    assert said.err.count("\n") == 1
    assert says in said.err
