"""The processes that trace end when the one that asked ends, when a program comes to no step, and leave nothing behind."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import tightfit
from tightfit.capture.processes import trace_progress as progress
from tightfit.capture.trace import no_step
from tightfit.cli.main import run
from tightfit.errors import CaptureError, UsageError
from tightfit.fit import batch_size
from tightfit.fit.planning_progress import Progress

# Many processes and traces, of which each commit tries a half.
pytestmark = pytest.mark.by_turns(2)

# What a test waits for comes at once; this is for a test that fails.
PATIENCE_SECONDS = 120
# What it starts is in a session of its own, and nobody's child.
RUNS_ON = """\
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
os.wait()
sys.stdin.close()
sys.stderr.write("begun")
sys.stderr.flush()
while True:
    pass
"""
STEPS = """\
import sys, torch
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[1])):
    model(torch.ones(2, 8, device="cuda")).sum().backward()
    optimizer.step()
while True:
    pass
"""
DROPS_LAST = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

def workload(batch_size=8):
    model = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(20, 64)), batch_size=batch_size, drop_last=True)
    while True:
        for (rows,) in loader:
            model(rows.cuda()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            yield
"""


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)


def _wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere what a program has started is not found")
@pytest.mark.parametrize(
    ("number", "words", "mechanism"),
    [
        (signal.SIGKILL, ["estimate", "train.py"], "namespaces"),
        pytest.param(signal.SIGKILL, ["estimate", "train.py"], "python", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, ["estimate", "train.py"], "namespaces", marks=pytest.mark.slow),
        (signal.SIGHUP, ["estimate", "train.py"], "python"),
        (signal.SIGINT, ["plan", "train.py", "--search", "batch-size"], "namespaces"),
    ],
)
def test_all_that_a_program_has_started_dies_with_the_process_that_asked(
    number: signal.Signals, words: list[str], mechanism: str, tmp_path: Path
) -> None:
    Path("train.py").write_text(RUNS_ON)
    with subprocess.Popen(
        # As a shell starts it in the background: interrupts are ignored. A suite that was started by nohup hands on that hangups are, too.
        [
            *(sys.executable, "-c"),
            "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGHUP, signal.SIG_DFL); "
            "from tightfit.cli.shared.progress import ProgressLine; ProgressLine.INTERVAL_IN_A_PIPE = float('inf'); "
            "from tightfit.__main__ import main; main()",
            *(*words, "--device", "RTX 4090", "--show-output"),
        ],
        env={**os.environ, "TIGHTFIT_CONTAINMENT": mechanism},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as asking:
        assert asking.stderr is not None and asking.stderr.read(5) == "begun"
        asking.send_signal(number)
        pipe = os.readlink(f"/proc/self/fd/{asking.stderr.fileno()}") if sys.platform == "linux" else ""
        try:
            # Ends when nobody has it open any more.
            _, said = asking.communicate(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            pytest.fail(f"not all have ended: {_holding(pipe)}")
    if number == signal.SIGINT:
        assert (asking.returncode, said) == (130, "tightfit: interrupted\n")
    else:
        assert (asking.returncode, said) == (-number, "")
    _wait_until(lambda: list((tmp_path / "temporary").iterdir()) == [])


def _holding(pipe: str) -> list[str]:
    """What is known of each process that has `pipe` open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.name != str(os.getpid()) and any(os.readlink(each) == pipe for each in process.glob("fd/*")):
                status = re.findall(r"^(?:State|PPid|NSpid|SigPnd|ShdPnd):.*", (process / "status").read_text(), re.M)
                found.append(f"{(process / 'cmdline').read_text()!r} {status} {(process / 'wchan').read_text()}")
        except OSError:  # It has ended meanwhile.
            continue
    return found


@pytest.mark.parametrize("steps", ["0", "2"])
def test_a_program_that_comes_to_no_further_step_ends_with_a_line(
    steps: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").write_text(STEPS)
    assert run(["estimate", "train.py", "--device", "RTX 4090", "--timeout", "2", "--", steps]) == 3
    said = capfd.readouterr().err
    assert re.fullmatch(
        r"tightfit: train\.py: no step ended within 2 s(; it was at train\.py:\d)?; if it only needs more time, .* --timeout SECONDS\n",
        said,
    )
    assert list((tmp_path / "temporary").iterdir()) == []


def test_the_line_is_that_of_the_programs_main_thread() -> None:
    said = (
        "Timeout (0:00:02)!\nThread 0x1 (most recent call first):\n"
        '  File "/usr/lib/python3.11/threading.py", line 331 in wait\n  File "other.py", line 3 in wait\n\n'
        'Thread 0x2 (most recent call first):\n  File "/lib/site-packages/torch/x.py", line 1 in next\n'
        '  File "train.py", line 9 in read\n  File "train.py", line 20 in <module>\n'
    )
    assert "within 2 s; it was at train.py:9; if it" in no_step("train.py", said, 2.0)
    assert "within 0.5 s; if it" in no_step("train.py", "Timeout", 0.5)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the place is not asked for")
def test_a_program_without_a_step_is_asked_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "WAITING_SECONDS", 0.0)
    Path("train.py").write_text("import time\ntime.sleep(1)\nwhile True:\n    time.sleep(0.1)\n")
    told: list[Progress] = []
    with pytest.raises(CaptureError, match=r"it was at train\.py:4"):
        tightfit.estimate("train.py", "RTX 4090", timeout=4, on_progress=told.append)
    places = [each.trace.place for each in told if each.trace is not None]
    assert "train.py:2" in places or "train.py:4" in places
    assert told[-1].trace is not None and told[-1].trace.num_steps == 0


@pytest.mark.parametrize("ask", [tightfit.estimate, tightfit.plan])
def test_the_time_can_be_set_in_python_too(ask: Callable[..., object]) -> None:
    Path("train.py").write_text("while True:\n    pass\n")
    with pytest.raises(CaptureError, match=r"no step ended within 0\.5 s"):
        ask("train.py", "RTX 4090", timeout=0.5)
    with pytest.raises(UsageError, match="give the seconds to wait for a step"):
        ask("train.py", "RTX 4090", timeout=0)


def test_a_search_ends_where_a_loader_has_no_batch(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(batch_size, "MAX_TRACES", 2)
    monkeypatch.setattr(batch_size, "MAX_PLANS", 0)
    Path("work.py").write_text(DROPS_LAST)
    words = ["--search", "batch_size", "-p", "batch_size=20", "--steps", "1"]
    assert run(["plan", "work.py:workload", "--device", "RTX 4090", *words]) == 0
    said = " ".join(capfd.readouterr().out.split())
    assert "batch_size 20 is the largest that was found to fit" in said
    assert "the data set has 20 examples" in said


def test_where_no_size_has_a_batch_the_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(batch_size, "MAX_PLANS", 0)
    Path("work.py").write_text(DROPS_LAST.replace("torch.ones(20, 64)", "torch.ones(0, 64)"))
    words = ["--search", "batch_size", "-p", "batch_size=1", "--steps", "1"]
    assert run(["plan", "work.py:workload", "--device", "RTX 4090", *words]) == 3
    assert "reads a DataLoader that has no batch" in capfd.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="needs pipes that are inherited")
def test_where_no_signal_tells_of_the_parents_end_a_closed_pipe_does() -> None:
    code = (
        "from tightfit.capture.processes import children; import os\nchildren._IS_LINUX = False\nchildren.die_with_parent(os.getppid())\n"
        "print('begun', flush=True)\nwhile True:\n    pass\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stdin is not None
        assert child.stdout.readline() == "begun\n"
        child.stdin.close()
        assert child.wait(timeout=PATIENCE_SECONDS) == 1
