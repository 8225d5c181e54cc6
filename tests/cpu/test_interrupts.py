"""Ctrl-C: one line, exit code 130, no traceback, no file half written and no process or folder left."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tightfit import __main__
from tightfit.cli import main, replay
from tightfit.cli.main import run

# Tells where it is by a file, and then waits for ever.
WAITS = """\
import os, signal, sys, torch
open(sys.argv[1], "w").write(str(os.getpid()))
while True:
    signal.pause()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="waits for a pipe to be opened")
@pytest.mark.parametrize("command", ["estimate", "record"])
def test_a_trace_that_is_interrupted(command: str, tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    (tmp_path / "temporary").mkdir()
    os.mkfifo(tmp_path / "began")
    outputs = (
        ["--save-tape", "run.npz", "--save-recording", "x.pickle"] if command == "estimate" else ["-o", "x.pickle"]
    )
    with subprocess.Popen(
        [sys.executable, "-m", "tightfit", command, "waits.py", "--device", "4090", *outputs, "--", "began"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary")},
    ) as process:
        # Opening the pipe waits for the script to open its end.
        traced = int((tmp_path / "began").read_text())
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert (process.returncode, out, err) == (130, "", "tightfit: interrupted\n")
    assert sorted(os.listdir(tmp_path)) == ["began", "temporary", "waits.py"]
    assert os.listdir(tmp_path / "temporary") == []
    with pytest.raises(ProcessLookupError):
        os.kill(traced, 0)


def interrupted(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_a_replay_that_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(replay, "ProgressLine", interrupted)
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
