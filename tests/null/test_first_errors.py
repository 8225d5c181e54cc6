"""What somebody meets first who gives a wrong file, or has no GPU: one line that says so."""

from pathlib import Path

import pytest

from tightfit.cli.arguments.programs import exit_code_of
from tightfit.errors import RecordingError
from tightfit.recordings.read import read_recording
from tightfit.tape import Tape


@pytest.mark.parametrize(("content", "said"), [(b"", "it is empty"), (b"\xfc\x00" * 99, "it is no .npz archive")])
def test_what_is_no_tape_is_not_said_to_be_a_pickle(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "run.npz"
    path.write_bytes(content)
    with pytest.raises(RecordingError, match=said):
        Tape.load(path)


@pytest.mark.parametrize("content", [b"import torch\n", b'{"schema": 1}'])
def test_what_is_no_recording_is_not_said_to_have_an_opcode(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(content)
    with pytest.raises(RecordingError, match="it does not begin as a pickle does"):
        read_recording(path)


def test_a_program_that_finds_no_gpu_is_told_what_needs_none(capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    assert exit_code_of(run, "train.py") == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("tightfit: torch found no GPU on this machine")
    assert "tightfit run --virtual" in last


def test_an_error_about_bfloat16_names_the_technique_that_has_weights_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> None:
        raise TypeError("Got unsupported ScalarType BFloat16")

    assert exit_code_of(run, "train.py", lowered_by="pure_bf16") == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("tightfit: pure_bf16 keeps the weights in bfloat16")
