"""What is given in place of a target: a module as `python -m` takes it runs, and files of other kinds are refused in a line that says what to give."""

import json
import sys
import zipfile
from pathlib import Path

import pytest

from tightfit.capture.targets.target_files import module_file, refuse_other_files
from tightfit.capture.targets.target_kinds import Script, parse_target
from tightfit.cli.main import run
from tightfit.errors import ProgramError, UsageError

TRAIN = """
import sys, torch
from . import sizes
from package import sizes as same
assert sizes is same and __package__ == "package" and __spec__.name == "package.train" and sys.argv[1:] == ["--lr", "1"], sys.argv
model = torch.nn.Linear(sizes.WIDTH, sizes.WIDTH).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(9):
    model(torch.ones(4, sizes.WIDTH, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "package"
    (package / "runs").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    (package / "train.py").write_text(TRAIN)
    (package / "runs" / "__main__.py").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("package.train", "package/train.py"),
        ("package.runs", "package/runs/__main__.py"),
        ("package.nothing", None),
        ("package.train.more", None),
        ("package", None),
        ("llama-3.1-8b", None),
        ("qwen2.5", None),
        ("package..train", None),
    ],
)
def test_the_file_of_a_module_is_found_without_importing_its_package(folder: Path, name: str, file: str | None) -> None:
    assert module_file(name) == file


def test_a_module_of_nowhere_is_no_model_type(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"no file and no module package\.nothing .*python -m package\.nothing"):
        parse_target("package.nothing")


def test_a_module_runs_as_python_runs_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "package" / "__init__.py").write_text("")
    (folder / "package" / "sizes.py").write_text("WIDTH = 64\n")
    words = ["estimate", "-m", "package.train", "--device", "4090", "--json", "--", "--lr", "1"]
    code = run(words)
    said = capsys.readouterr()
    assert code == 0, said.err
    answer = json.loads(said.out)
    assert (answer["target"], len(answer["steps"])) == ("package.train", 3)


def test_a_package_runs_as_python_runs_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "package" / "__init__.py").write_text("")
    (folder / "package" / "sizes.py").write_text("WIDTH = 64\n")
    (folder / "package" / "__main__.py").write_text(TRAIN.replace("package.train", "package.__main__"))
    code = run(["estimate", "-m", "package", "--device", "4090", "--json", "--", "--lr", "1"])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert len(json.loads(said.out)["steps"]) == 3
    # A file of that name is what it was before.
    (folder / "package.py").write_text("raise SystemExit('the file')\n")
    assert run(["estimate", "-m", "package", "--device", "4090"]) == 3
    assert "the file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("train.ipynb", b"{}", "jupyter nbconvert --to script train.ipynb"),
        ("oom.pickle", b"\x80\x04.", "recordings are read by tightfit doctor"),
        ("run.npz", b"PK\x03\x04", "a trace that --save-tape wrote"),
        ("model.safetensors", b"\x00", "a checkpoint"),
        ("config.yaml", b"lr: 1", "give the script that reads it"),
        ("start.sh", b"torchrun train.py", "give the Python script that it starts"),
        ("error.log", b"CUDA out of memory. Tried to allocate 2.00 GiB", "tightfit record SCRIPT writes a recording"),
        ("notes", b"hello", "neither a Python script"),
        ("plan.json", b'{"schema": 1, "choices": [], "frontier": []}', "tightfit report plan.json shows it"),
        ("cut.json", b'{"schema": 1, "ch', "cut.json is not JSON"),
    ],
)
def test_files_of_other_kinds_are_refused_with_what_to_give(folder: Path, name: str, content: bytes, said: str) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(UsageError, match=said) as caught:
        refuse_other_files(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"), [("mine", "; nearest: mine.py"), ("workload", "is given with its file: FILE.py:workload")]
)
def test_a_script_without_its_ending_and_a_function_without_its_file(
    folder: Path, name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "mine.py").touch()
    assert run(["estimate", name, "--device", "4090"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["doctor", "record"])
def test_the_text_of_an_error_is_no_name_of_a_file(
    folder: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for text, said in (("CUDA out of memory. " * 30, "is the text of an error"), ("x" * 300, "too long for one")):
        assert run([command, text, *(["-o", "x.pickle"] if command == "record" else [])]) == 2
        assert said in capsys.readouterr().err


def test_a_checkpoint_is_known_by_its_content(folder: Path) -> None:
    with zipfile.ZipFile("last", "w") as file:
        file.writestr("data.pkl", b"")
    with pytest.raises(UsageError, match="a checkpoint"):
        refuse_other_files("last")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("python", "leave out python"),
        ("train.py --epochs 1", "as in train.py -- --epochs 1"),
        (".", "has no config.json"),
        ("", "the name of the target is empty"),
        ("package/train.py/", "leave out the last character"),
    ],
)
def test_words_and_folders_that_are_no_target(folder: Path, name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_target(name, arguments=("train.py",))


def test_a_syntax_error_is_known_before_anything_starts(folder: Path) -> None:
    (folder / "wrong.py").write_text("import torch\nx = (1,\n")
    with pytest.raises(ProgramError, match=r"wrong\.py has a syntax error at wrong\.py:2: '\(' was never closed"):
        parse_target("wrong.py")
    # A warning of the compiler is the program's own, and comes when it runs.
    (folder / "right.py").write_text("x = '\\d'\n")
    assert parse_target("right.py") == Script(path="right.py", arguments=())


@pytest.mark.parametrize("command", ["doctor", "report", "diff"])
def test_a_plan_is_named_before_a_card_is_asked_for(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (folder / "cut.json").write_text('{"schema": 1, "ch')
    assert run([command, "cut.json", *(["cut.json"] if command == "diff" else [])]) == 2
    assert capsys.readouterr().err.startswith("tightfit: cut.json is not JSON")


@pytest.mark.skipif(sys.platform == "win32", reason="a folder that somebody is in cannot be removed there")
def test_a_folder_that_was_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(UsageError, match="the current folder was removed"):
        parse_target(str(tmp_path / "train.py"))
