"""Plans count what follows the steps: an evaluation that needs more than the training is planned for, with the techniques on it."""

from pathlib import Path

import pytest
from tests.cpu.run_arguments import run_arguments

from tightfit import plan
from tightfit.capture.targets.target_kinds import Script
from tightfit.fit.planning import _of_all
from tightfit.fit.searching.allowed import Allowed
from tightfit.fit.searching.candidates import Candidates
from tightfit.fit.searching.offers import Offers
from tightfit.fit.traced_runs import TracedRuns
from tightfit.planner.plan import Proof

PROGRAM = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.h:
            x = block(x)
        return x


model = Model().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for i in range(50):
    loss = model(torch.randn(8, 512, 256, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval()
with torch.no_grad():
    model(torch.randn(EVALUATED, 512, 256, device="cuda"))
"""


def script(folder: Path, *, evaluated: int) -> Path:
    path = folder / "train.py"
    path.write_text(PROGRAM.replace("EVALUATED", str(evaluated)))
    return path


def test_what_is_only_freed_after_the_steps_is_the_peak_of_no_plan(tmp_path: Path) -> None:
    """A loss that is printed: what the plain run held then was in the way of weights and states that are at the host."""
    path = tmp_path / "train.py"
    path.write_text(PROGRAM.partition("model.eval()")[0] + "    print(loss.item())\n")
    runs = TracedRuns(**run_arguments(Script(path=str(path), arguments=()), "train.py"))
    offers = Offers(runs, Allowed(all_lossy=False, names=frozenset(), without=()))
    plain = runs.run_with(())
    assert plain.later is None and len(plain.tape.events) > len(plain.profile.tape.events)
    problem = Candidates(runs, offers, plain.high_bytes, host_bytes=1 << 30).variant(plain).problem
    saved = {o.technique: problem.peak_bytes((number,)) for number, o in enumerate(problem.options)}
    assert saved["trained_weight_streaming"] < 0.95 * problem.peak_bytes(())
    assert problem.events.max() < len(plain.profile.tape.events)


def test_a_problem_counts_an_evaluation_and_what_techniques_save_in_it(tmp_path: Path) -> None:
    path = script(tmp_path, evaluated=64)
    runs = TracedRuns(**run_arguments(Script(path=str(path), arguments=()), "train.py"))
    offers = Offers(runs, Allowed(all_lossy=False, names=frozenset(), without=()))
    plain = runs.run_with(())
    assert plain.later is not None
    assert len(plain.profile.tape.events) < len(plain.tape.events)
    problem = Candidates(runs, offers, plain.high_bytes).variant(plain).problem
    assert problem.peak_bytes(()) == plain.estimate.peak.allocated_bytes
    begin = len(plain.profile.tape.events)
    saved = {
        option.technique for option in problem.options for c in option.changes if c.begin >= begin and c.num_bytes < 0
    }
    assert "tiled_tokens" in saved


@pytest.mark.parametrize(("evaluated", "fits"), [(8, True), (512, False)])
def test_a_budget_is_for_the_evaluation_too(tmp_path: Path, evaluated: int, fits: bool) -> None:
    found = plan(str(script(tmp_path, evaluated=evaluated)), "RTX 4090", budget="690MiB", prove=False)
    assert found.fits is fits
    assert (found.run.peak.device_high_bytes <= found.budget_bytes) is fits
    assert found.coverage.is_whole


FROZEN = """
for part in model.h[:3]:
    part.requires_grad_(False)
for stage in range(2):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for i in range(4):
        loss = model(torch.randn(8, 512, 256, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.requires_grad_(True)
"""


def test_blocks_that_are_trained_after_the_steps_alone_are_planned_for(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM[: PROGRAM.index("optimizer = ")] + FROZEN)
    found = plan(str(path), "RTX 4090", budget="700MiB", without=["tiled_tokens"], prove=False)
    assert found.fits
    assert {"Model.h.0", "Model.h.1", "Model.h.2"} & {each.where for each in found.choices}
    # The steps that are run for a proof are those in which they are frozen.
    proof = _of_all(Proof(kind="values", steps=3), found.choices[:1])
    assert proof.kind == "structure" and "changes nothing in the first 3 steps" in proof.what
