"""Ctrl-C: one line, exit code 130, no traceback, no file half written and no process or folder left."""

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.plans import a_plan

from tightfit import __main__
from tightfit.cli import main, replay
from tightfit.cli.main import run

# Many processes and traces, of which each commit tries a half.
pytestmark = pytest.mark.by_turns(2)

# Says that it has begun, and then waits for ever.
WAITS = """\
import signal, sys, torch
sys.stderr.write("begun")
sys.stderr.flush()
while True:
    signal.pause()
"""


# However slow the machine is, no line of progress comes first.
QUIET = (
    "from tightfit.cli.shared.progress import ProgressLine; ProgressLine.INTERVAL_IN_A_PIPE = float('inf'); "
    "from tightfit.__main__ import main; main()"
)


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, -signal.SIGTERM, "terminated")],
)
def test_a_trace_that_is_interrupted(tmp_path: Path, number: int, code: int, said: str) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    (tmp_path / "temporary").mkdir()
    outputs = ["--save-tape", "run.npz", "--save-recording", "x.pickle"]
    with subprocess.Popen(
        [sys.executable, "-c", QUIET, "estimate", "waits.py", "--device", "4090", "--show-output", *outputs],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary")},
    ) as process:
        assert process.stderr is not None and process.stderr.read(5) == "begun"
        process.send_signal(number)
        # Ends when nobody has the pipes open any more: the traced program is gone too.
        out, err = process.communicate()
    assert (process.returncode, out, err) == (code, "", f"tightfit: {said}\n")
    assert sorted(os.listdir(tmp_path)) == ["temporary", "waits.py"]
    assert os.listdir(tmp_path / "temporary") == []


def test_a_guarded_program_that_is_terminated_says_where_it_was(tmp_path: Path) -> None:
    text = "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGTERM)\nfinally:\n    print('left')\n"
    (tmp_path / "waits.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "tightfit", "run", "--guard", "waits.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    *before, last = done.stderr.splitlines()
    assert (done.returncode, done.stdout, last) == (-signal.SIGTERM, "", "tightfit: terminated at waits.py:3")
    assert before == ["tightfit: guard: found no training loop in the script that could be guarded; it ran without"]
    # What it forks is not the command, and a handler of its own is its own.
    child = (
        "child = os.fork()\nif not child:\n    os.kill(os.getpid(), signal.SIGTERM)\nprint(os.waitpid(child, 0)[1])\n"
    )
    own = "signal.signal(signal.SIGTERM, lambda *_: print('own'))\nos.kill(os.getpid(), signal.SIGTERM)\n"
    (tmp_path / "waits.py").write_text(f"import os, signal\n{child}{own}")
    done = subprocess.run(
        [sys.executable, "-m", "tightfit", "run", "--guard", "waits.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, f"{signal.SIGTERM.value}\nown\n")
    assert "terminated" not in done.stderr


def test_a_program_that_is_terminated_ends_as_under_python(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    a_plan().save(tmp_path / "plan.json")
    words = [sys.executable, "-m", "tightfit", "run", "--plan", "plan.json", "waits.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGTERM, "", "")


@pytest.mark.parametrize("words", [["--guard"], ["--plan", "plan.json"]])
def test_a_run_that_is_interrupted_says_where(tmp_path: Path, words: list[str]) -> None:
    text = "import _thread, signal, time, torch\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    (tmp_path / "waits.py").write_text(text + "_thread.interrupt_main()\ntime.sleep(60)\n")
    a_plan().save(tmp_path / "plan.json")
    command = [sys.executable, "-m", "tightfit", "run", *words, "waits.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("tightfit: interrupted at waits.py:")


def test_what_a_recorded_program_has_forked_ends_by_the_signal_and_records_nothing(tmp_path: Path) -> None:
    # It does not wait in C code, where a signal that has come just before would be handled after the wait alone.
    text = "import os, signal, torch\nchild = os.fork()\nwhile not child:\n    pass\n"
    text += "os.kill(child, signal.SIGTERM)\nprint(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    (tmp_path / "forks.py").write_text(text)
    command = [sys.executable, "-m", "tightfit", "record", "--host", "forks.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{-signal.SIGTERM}\n")
    assert done.stderr.count("\n") == 1 and "wrote forks.recording.pickle" in done.stderr


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, -signal.SIGTERM, "terminated")],
)
def test_a_signal_from_outside_ends_it_with_a_recording(tmp_path: Path, number: int, code: int, said: str) -> None:
    """The script says that it has begun, and then waits for a line that never comes."""
    (tmp_path / "waits.py").write_text(
        "import signal, sys, torch\nsignal.signal(signal.SIGINT, signal.default_int_handler)\nkept = torch.ones(1000)\n"
        "print('begun', flush=True)\nsys.stdin.readline()\nprint('went on')\n"
    )
    program = str(Path(sys.executable).with_name("tightfit"))
    with subprocess.Popen(
        [program, "record", "--host", "waits.py"],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(number)
        out, err = process.communicate()
    assert (process.returncode, out) == (code, "")
    assert err.startswith(f"tightfit: {said}; wrote waits.recording.pickle")
    assert err.count("\n") == 1
    recorded = pickle.loads((tmp_path / "waits.recording.pickle").read_bytes())
    assert 4000 in [event["size"] for trace in recorded["device_traces"] for event in trace]


def interrupted(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_a_replay_that_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(replay, "ProgressLine", interrupted)
    (tmp_path / "x.pickle").touch()
    assert run(["replay", str(tmp_path / "x.pickle")]) == 130
    assert tuple(capsys.readouterr()) == ("", "tightfit: interrupted\n")


def test_an_interrupt_before_the_command_line_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main, "run", interrupted)
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 130
    assert tuple(capsys.readouterr()) == ("", "tightfit: interrupted\n")


# Sends the interrupt of Ctrl-C to itself when a module is about to be imported.
INTERRUPTED_IMPORT = """\
import os, runpy, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == MODULE:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

MODULE = sys.argv[1]
sys.meta_path.insert(0, Interrupts())
sys.argv[1:] = ["estimate", "none.npz", "--device", "4090"]
runpy.run_module("tightfit", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("module", ["tightfit.cli.main", "cyclopts", "tightfit.cli.estimate", "tightfit.fit"])
def test_an_interrupt_while_the_command_is_imported(module: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, module]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("", "tightfit: interrupted\n")
    # Python itself ends by the signal where the interrupt came within the source of a dataclass: a shell shows 130 for both.
    assert done.returncode in (130, -signal.SIGINT)
