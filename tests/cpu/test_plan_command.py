"""`tightfit plan`: the answer as text and as JSON, the plan as a file, and errors of one line."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import tightfit
from tightfit.cli.main import run
from tightfit.errors import PlanError

WORKLOAD = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, rows):
        return rows + self.narrow(torch.nn.functional.gelu(self.wide(rows)))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, rows):
        for block in self.blocks:
            rows = block(rows)
        return rows


def workload(num_rows=16384):
    model = Stack().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        loss = model(torch.randn(num_rows, 256, device="cuda")).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
"""
COMMAND = ["plan", "model.py:workload", "--device", "RTX 4090", "--budget", "1000MiB"]
KEYS = {
    "schema": None,
    "is_changed": None,
    "choices_digest": None,
    "fits": None,
    "peak": {"allocated_bytes", "reserved_bytes", "device_bytes", "device_low_bytes", "device_high_bytes"},
    "seconds_per_step": None,
    "exact": None,
    "target": None,
    "device": {"name", "capacity_bytes"},
    "budget_bytes": None,
    "headroom_bytes": None,
    "baseline": {"peak", "seconds_per_step"},
    "promised_bytes": None,
    "choices": {"technique", "where", "settings", "saves_bytes", "adds_seconds", "exact"},
    "bound": {"seconds_per_step", "is_proven"},
    "alternatives": {"name", "device_bytes", "seconds_per_step", "fits", "exact", "why"},
    "frontier": {"device_bytes", "seconds_per_step"},
    "advice": None,
    "model": {"roots"},
    "host_bytes": None,
    "disk_bytes": None,
    "versions": None,
    "assumptions": {"where", "what"},
    "proof": {"kind", "steps", "seconds", "what"},
    "is_interrupted": None,
    "coverage": {"left_at", "stopped", "cuts", "last_turn", "last_call", "not_reached"},
    "predicted_seconds": None,
    "margin": None,
    "uncertainty": None,
    "elapsed_seconds": None,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("plan")
    (made / "model.py").write_text(WORKLOAD)
    return made


@pytest.fixture(autouse=True)
def in_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)


@pytest.fixture(scope="module")
def planned(folder: Path) -> dict[str, Any]:
    """What the command prints for a budget that needs a plan; the plan is in plan.json."""
    context = pytest.MonkeyPatch()
    context.chdir(folder)
    with context.context(), pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr("sys.stdout.write", said.append)
        assert run([*COMMAND, "--json", "-o", "plan.json"]) == 0
    context.undo()
    return json.loads("".join(said))


def test_the_keys_of_a_plan(planned: dict[str, Any]) -> None:
    assert planned["schema"] == 1
    assert set(planned) == set(KEYS)
    for key, inner in KEYS.items():
        if inner is not None:
            for entry in planned[key] if isinstance(planned[key], list) else [planned[key]]:
                assert set(entry) == inner


def test_what_is_planned_fits_and_the_plain_run_does_not(planned: dict[str, Any]) -> None:
    budget = 1000 << 20
    assert planned["fits"]
    assert planned["exact"]
    assert planned["peak"]["device_high_bytes"] <= planned["budget_bytes"] == budget
    assert planned["baseline"]["peak"]["device_bytes"] > budget
    assert planned["choices"]
    assert planned["model"]["roots"][0]["inputs"] == {"0": [16384, 256]}
    # A likely peak, without the safety margin, as those of the runs beside it.
    (every,) = (each for each in planned["alternatives"] if each["name"] == "checkpointing of every block")
    assert every["device_bytes"] < planned["peak"]["device_bytes"] - (100 << 20), "it checkpoints two blocks more"


def test_the_file_is_the_plan_that_was_printed(planned: dict[str, Any]) -> None:
    plan = tightfit.Plan.load("plan.json")
    assert {**plan.to_json(), "elapsed_seconds": planned["elapsed_seconds"]} == planned
    assert plan.explain().startswith("fits with ")


def test_a_plan_that_cannot_be_written_leaves_the_old_one(
    planned: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, before = tightfit.Plan.load("plan.json"), Path("plan.json").read_text()
    odd = dataclasses.replace(plan, model={"roots": [object()]})
    with pytest.raises(TypeError):
        odd.save("plan.json")
    assert Path("plan.json").read_text() == before


def test_a_file_that_is_cut_short_is_no_plan(planned: dict[str, Any], tmp_path: Path) -> None:
    text = Path("plan.json").read_text()
    (tmp_path / "half.json").write_text(text[: len(text) // 2])
    with pytest.raises(PlanError, match=r"half\.json is not a plan"):
        tightfit.Plan.load(tmp_path / "half.json")


def test_a_run_that_fits_has_nothing_to_do_and_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "model.py:workload", "--device", "RTX 4090", "-p", "num_rows=64"]) == 0
    assert capsys.readouterr().out.startswith("fits without changes: ")


def test_an_interrupted_plan_is_the_best_so_far_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Interrupted while it is proven: nothing is missing but that."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tightfit.fit.proof.Prover.prove", interrupted)
    assert run([*COMMAND, "-o", "so_far.json"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("fits with ")
    assert "the search was interrupted, this is the best so far" in " ".join(said.out.split())
    plan = tightfit.Plan.load("so_far.json")
    assert plan.is_interrupted and plan.fits
    assert plan.proof.what == "not by values: that was interrupted"


def test_interrupted_before_anything_was_found_it_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tightfit.fit.traced_runs.trace", interrupted)
    assert run(COMMAND) == 130
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "tightfit: interrupted\n")


def test_a_budget_below_everything_exits_with_1_and_says_what_was_reached(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "model.py:workload", "--device", "RTX 4090", "--budget", "1MiB", "-p", "num_rows=64"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("does not fit: ")
    assert "lowest peak found" in said


@pytest.mark.parametrize(
    ("changed", "code", "reason"),
    [
        (["--budget", "0"], 2, "the budget is 0; give the GPU memory that the process may use, such as 22GiB"),
        (["--budget", "some"], 2, "--budget: 'some' is not a size; write a number with a unit, such as 22GiB"),
        (["--allow", "magic"], 2, "--allow magic: no such technique; allow lossy (all of them) or one of "),
        (["--allow", "autocasts"], 2, "--allow autocasts: no such technique (did you mean autocast?); allow lossy "),
        (["--without", "attentoin"], 2, "--without attentoin (did you mean attention?): write TECHNIQUE or "),
        (["--steps", "0"], 2, "steps is 0: at least one step must be traced"),
        (["-o", "nowhere/plan.json"], 2, "--output nowhere/plan.json: there is no folder nowhere"),
        (["--device", "no such card"], 2, "no GPU is called 'no such card'"),
        (["-p", "rows=3"], 2, "model.py:workload: got an unexpected keyword argument 'rows'; its parameters: num_rows"),
    ],
)
def test_errors_are_one_line_each(
    changed: list[str], code: int, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = [] if "--device" in changed else ["--device", "4090"]
    assert run(["plan", "model.py:workload", *base, *changed]) == code
    said = capsys.readouterr()
    assert said.err.startswith(f"tightfit: {reason}"), said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_what_can_be_allowed_is_listed_with_what_is_lossy_on_some_programs_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["plan", "model.py:workload", "--device", "4090", "--allow", "magic"]) == 2
    assert ", low_bit_states, micro_batches (lossy where the model draws random numbers), pure_bf16\n" in (
        capsys.readouterr().err
    )


def test_a_script_that_never_trains_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "idle.py").write_text(
        "import torch\nnet = torch.nn.Linear(2, 2).cuda()\ntorch.optim.SGD(net.parameters())\nprint(net(torch.ones(1, 2).cuda()))\n"
    )
    assert run(["plan", "idle.py", "--device", "4090"]) == 3
    said = capsys.readouterr().err
    assert said.startswith("tightfit: the workload ended without a step: no optimizer stepped and no backward pass was")
    assert said.count("\n") == 1


def test_no_card_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("tightfit.cli.shared.local_cards.local_cards", list)
    assert run(["plan", "model.py:workload"]) == 2
    assert capsys.readouterr().err.startswith("tightfit: which GPU? There is none on this machine: name one")
