"""A plan as lines to paste: they run in the program, and the program then holds and computes what `tightfit run --plan` does."""

import json
import os
import sys
from pathlib import Path

import pytest
from tests.cpu.applied import CHOICES, Net, choice, plan_of, root

import tightfit
from tightfit.cli.main import run
from tightfit.errors import PlanError
from tightfit.fit import planning
from tightfit.reports.text.plan_code import paste_points, plan_code

SCRIPT = """\
import torch
from tests.cpu.applied import *


def main(rows=20000):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    net = Net().to(device)
    step_rule = torch.optim.AdamW(
        net.parameters(), lr=1e-2, foreach=True
    )
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        loss = net(torch.randn(rows, WIDTH).to(device)).square().mean()
        loss.backward()
        step_rule.step()
        step_rule.zero_grad()
        losses.append(loss.item())
    print(losses)


main()
"""
PLAN = plan_of(roots=[root(Net(), batch=20000)])


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))


def pasted(source: str, code: str) -> str:
    """The program with the lines where their comment says that they go."""
    (point,) = paste_points(source)
    lines = source.splitlines(keepends=True)
    return "".join([*lines[: point.line], code, *lines[point.line :]])


@pytest.mark.parametrize("saved", [None, "plan.json"])
def test_the_program_with_the_lines_does_what_the_runner_does(
    saved: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same peak on the virtual card, to the byte, which is not that of the plain program; and the same losses on the host."""
    PLAN.save("plan.json")
    Path("train.py").write_text(SCRIPT)
    code = plan_code(PLAN, source=SCRIPT, path="train.py", saved=saved)
    assert "# After line 11 of train.py, where step_rule is made:" in code
    assert "    tightfit.apply(plan, net, step_rule)\n" in code
    Path("pasted.py").write_text(pasted(SCRIPT, code))
    peaks = [tightfit.estimate(name, PLAN.device, steps=2).peak for name in ("train.py", "pasted.py")]
    ran = planning.run_virtually(PLAN, "train.py")[0].peak
    assert peaks[1] == ran
    assert ran.allocated_bytes < peaks[0].allocated_bytes
    assert run(["run", "--plan", "plan.json", "train.py"]) == 0
    assert run(["record", "--host", "pasted.py"]) == 0
    first, second = (json.loads(line) for line in capfd.readouterr().out.splitlines())
    assert first == second


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("opt = torch.optim.SGD(model.parameters(), lr=1)", [(1, "", "model", "opt")]),
        ("if x:\n    self.opt = AdamW([{'params': self.net.parameters()}])", [(2, "    ", "self.net", "self.opt")]),
        ("o = Adam([p for _, p in m.named_parameters() if p.requires_grad])", [(1, "", "m", "o")]),
        ("n = clip_grad_norm_(model.parameters(), 1.0)", []),
        ("n = sum(p.numel() for p in model.parameters())", []),
        ("a = SGD(g.parameters())\nb = SGD(d.parameters())", [(1, "", "g", "a"), (2, "", "d", "b")]),
        ("o = SGD([*a.parameters(), *b.parameters()])", []),
        ("def (", []),
        ("", []),
    ],
)
def test_where_a_program_makes_its_optimizer(source: str, found: list[tuple[int, str, str, str]]) -> None:
    assert [(p.line, p.indent, p.model, p.optimizer) for p in paste_points(source)] == found


def test_without_one_such_place_the_names_are_to_be_filled_in() -> None:
    several = "a = SGD(g.parameters())\nb = SGD(d.parameters())"
    for source in ("", several):
        code = plan_code(PLAN, source=source, path="train.py", saved=None)
        assert "# In train.py, after the model and its optimizer were made and before the first step:" in code
        assert "\ntightfit.apply(plan, model, optimizer)\n" in code
        compile(code, "pasted", "exec")
    two = plan_of(roots=[root(Net()), root(Net()) | {"class": "PatchCritic"}])
    code = plan_code(two, source="", path="", saved="plan.json")
    assert "tightfit.apply(plan, net, optimizer_of_net)" in code
    assert "tightfit.apply(plan, patch_critic, optimizer_of_patch_critic)" in code


def test_settings_of_the_allocator_go_to_the_top() -> None:
    plan = plan_of([*CHOICES, choice("allocator_settings", "allocator", alloc_conf="expandable_segments:True")])
    code = plan_code(plan, source=SCRIPT, path="train.py", saved="plan.json")
    top, _, rest = code.partition("# After line 11")
    assert "# At the top of train.py, before torch is imported:\nimport os\n" in top
    variables: dict[str, object] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
        exec(top, variables)
        assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:128,expandable_segments:True"
    assert rest


def test_what_cannot_be_pasted_is_said() -> None:
    of_loop = plan_of([choice("micro_batches", "Net", loop="Trainer", num_parts=2)])
    with pytest.raises(PlanError, match=r"in the loop of Trainer, .* tightfit run --plan plan.json"):
        plan_code(of_loop, source="", path="", saved=None)
    assert plan_code(plan_of([]), source="", path="", saved=None).endswith(
        "fits as it is, there is nothing to paste.\n"
    )


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the lines go to stdout; the exit code is that of the plan."""
    Path("train.py").write_text(SCRIPT)
    words = ["plan", "train.py", "--device", "4090", "--as-code"]
    monkeypatch.setattr(planning, "plan", lambda *_, **__: PLAN)
    assert run([*words, "-o", "plan.json"]) == 0
    said = capsys.readouterr()
    assert said.err.startswith("tightfit: fits with 2 techniques (3 places)")
    compile(pasted(SCRIPT, said.out), "pasted.py", "exec")
    assert "tightfit.Plan.load('plan.json')" in said.out
    assert tightfit.Plan.load("plan.json").choices == PLAN.choices
    monkeypatch.setattr(planning, "plan", lambda *_, **__: plan_of(fits=False, budget_bytes=1 << 20))
    assert run(words) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("tightfit: does not fit")
    for more in (["--json"], ["--search", "rows"]):
        assert run([*words, *more]) == 2
