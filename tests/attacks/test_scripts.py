"""Scripts from end to end: traced, everything that is offered put on by `tightfit run`; each is trained right, or ends non-zero with the reason.

One is planned by the command as well. A plan is made here of all that techniques offer on the trace, first come, first served, and once more
from the other end, since a solver would leave most of it out on scripts this small.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tests.cpu.applied import plan_of
from tests.sampled import every_second

from tightfit.analysis.profile import Profile
from tightfit.capture.targets.target_kinds import Script
from tightfit.capture.trace import Preparation, Traced, trace
from tightfit.cli.main import run
from tightfit.devices.catalogue import find
from tightfit.planner.option import Option
from tightfit.planner.plan import Choice
from tightfit.techniques.registry import techniques

SCRIPTS = Path(__file__).with_name("scripts")
CARD = "RTX 4090"
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py"))
# The exit codes of an answer that is no: does not fit, and what could not be applied or ended with our own error swallowed.
NO = (1, 3)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts leave sys.argv and sys.path changed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=every_second(NAMES))
def traced(request: pytest.FixtureRequest) -> tuple[str, Traced]:
    """A script with its trace."""
    path = str(SCRIPTS / f"{request.param}.py")
    preparation = Preparation(function="tightfit.runtime.attach:prepare", argument={"choices": []})
    return path, trace(Script(path=path, arguments=()), label=path, device=CARD, preparation=preparation)


def _numbers(printed: str, *beginnings: str) -> list[float]:
    """What lines with these beginnings say."""
    lines = [line.split() for line in printed.splitlines() if line.startswith(beginnings)]
    return [float(word) for _, *words in lines for word in words]


def _printed(path: str, capfd: pytest.CaptureFixture[str]) -> str:
    """What the script prints without a plan."""
    plan_of((), roots=()).save("none.json")
    assert run(["run", "--plan", "none.json", path]) == 0
    return capfd.readouterr().out


def _choices(options: Sequence[Option]) -> list[Choice]:
    taken: set[str] = set()
    chosen = []
    for option in options:
        if option.exact and not taken & option.slots:
            taken |= option.slots
            chosen.append(
                Choice(
                    technique=option.technique,
                    where=option.where,
                    settings=option.settings,
                    saves_bytes=0,
                    adds_seconds=0.0,
                    exact=True,
                )
            )
    return chosen


def _run_with(path: str, plan: str, plain: str, capfd: pytest.CaptureFixture[str]) -> None:
    code = run(["run", "--plan", plan, path])
    said = capfd.readouterr()
    if code == 0:
        found = _numbers(said.out, "loss", "weights")
        assert found == pytest.approx(_numbers(plain, "loss", "weights"), rel=1e-5), said.err
        return
    assert code in NO, said.err
    assert said.err.strip() and "Traceback" not in said.err
    # Nothing was trained wrongly before the refusal.
    losses = _numbers(said.out, "loss")
    assert losses == pytest.approx(_numbers(plain, "loss")[: len(losses)], rel=1e-5), said.err


def test_all_that_is_offered_trains_right_or_is_refused(
    traced: tuple[str, Traced], capfd: pytest.CaptureFixture[str]
) -> None:
    path, of_script = traced
    plain = _printed(path, capfd)
    offered = [o for t in techniques().values() if t.exact for o in t.options(Profile(of_script.tape, find(CARD)))]
    for name, options in {"first.json": offered, "last.json": offered[::-1]}.items():
        choices = [c for c in _choices(options) if "alloc_conf" not in c.settings]
        plan_of(choices, roots=of_script.report["roots"]).save(name)
        _run_with(path, name, plain, capfd)


def test_a_script_that_is_planned_by_the_command_trains_right_or_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    path = str(SCRIPTS / "clipped_by_hand.py")
    plain = _printed(path, capfd)
    arguments = ["plan", path, "--device", CARD, "--budget", "545MiB", "-o", "plan.json"]
    code = run(arguments)
    assert code in (0, *NO) and "Traceback" not in capfd.readouterr().err
    if code == 0:
        _run_with(path, "plan.json", plain, capfd)
