"""Programs that report to a tracker (W&B, TensorBoard): what these do is not the program's, and the answer does not speak of it."""

import os
from pathlib import Path

import pytest

import tightfit
from tightfit.reports.verdicts import verdict_words

TRAINS = """\
import torch
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
# As W&B: a package with much code that does not run, a service in a process of its own, and a look at the machine.
TRACKER = """\
import platform, subprocess, sys
service = None

def log(values):
    global service
    platform.processor()
    service = service or subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    with open("tracked.jsonl", "a") as file:
        file.write(repr(values))
    if len(repr(values)) > 1000:
        save_model(values)
        sys.stdout.predict(values)
"""


@pytest.mark.usefixtures("traces_import_libraries_themselves")
def test_code_of_an_installed_tracker_is_not_named_wherever_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As `pip install --target packages` leaves it.
    (tmp_path / "packages" / "tracker-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "packages" / "tracker.py").write_text(TRACKER)
    script = tmp_path / "train.py"
    script.write_text(
        TRAINS
        + """\
import tracker
for step in range(20):
    loss = model(torch.ones(2, 8, device="cuda")).sum()
    loss.backward()
    optimizer.step()
    tracker.log({"loss": loss.item()})
"""
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "packages"), os.environ["PYTHONPATH"]]))
    found = tightfit.estimate("train.py", "RTX 4090")
    assert verdict_words(found)[0] == "fits"
    assert found.coverage.words == ""
    assert not any("packages" in holder.line for holder in found.allocation_sites)
    # Python asks `uname` for the processor, which is no news.
    assert not any("uname" in assumption.what for assumption in found.assumptions)
    assert not (tmp_path / "tracked.jsonl").exists()


def test_the_graph_of_a_model_is_written(tmp_path: Path) -> None:
    """TensorBoard's `add_graph`: a model is traced by `torch.jit.trace`, which runs it again without gradients and compares."""
    script = tmp_path / "train.py"
    script.write_text(
        TRAINS
        + """\
torch.jit.trace(model, torch.ones(2, 8, device="cuda"))
for _ in range(3):
    model(torch.ones(2, 8, device="cuda")).sum().backward()
    optimizer.step()
"""
    )
    assert tightfit.estimate(str(script), "RTX 4090").fits
