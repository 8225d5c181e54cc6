"""An exception of the user's program in one line: what helps where something was not found."""

import runpy
import sys
from pathlib import Path

import pytest

from tightfit.capture import trace
from tightfit.capture.child_process.child import ended_itself, line_that_says_most
from tightfit.capture.processes.fork_server import NOT_CLOSED_IN
from tightfit.errors.package_folders import package_folders
from tightfit.errors.program_errors import one_line


def test_a_file_beside_the_program_is_said_to_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my project").mkdir()
    (tmp_path / "my project" / "size.txt").write_text("64")
    monkeypatch.chdir(tmp_path)
    label = "my project/train.py"
    line = one_line(label, FileNotFoundError(2, "No such file or directory", "size.txt"))
    assert line.endswith("which runs in the folder that you are in: cd 'my project' first")
    # One that is nowhere, and one with its whole path, are the program's own matter.
    for name in ("other.txt", str(tmp_path / "size.txt")):
        assert "cd " not in one_line(label, FileNotFoundError(2, "No such file or directory", name))


def test_arguments_that_were_not_given_are_asked_for(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nsize = int(sys.argv[99])\n")
    with pytest.raises(IndexError) as caught:
        runpy.run_path(str(script))
    assert one_line("train.py", caught.value).endswith(
        "list index out of range; the program's own arguments go after --"
    )
    with pytest.raises(IndexError) as caught:
        list[int]()[0]
    assert "arguments" not in one_line("train.py", caught.value)


def test_an_assertion_without_a_message_says_its_condition(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("width = 63\nassert width % 4 == 0  # heads\n")
    with pytest.raises(AssertionError) as caught:
        runpy.run_path(str(script))
    assert one_line("train.py", caught.value).endswith("train.py:2: assert width % 4 == 0  # heads")
    script.write_text("assert False, 'four heads'\n")
    with pytest.raises(AssertionError) as caught:
        runpy.run_path(str(script))
    assert one_line("train.py", caught.value).endswith("train.py:1: four heads")
    assert one_line("train.py", NotImplementedError()).endswith("(no message)")


def test_a_module_that_is_missing_is_missing_in_the_python_that_runs() -> None:
    line = one_line("train.py", ModuleNotFoundError("No module named 'datasets'", name="datasets"))
    assert line == (
        "train.py raised ModuleNotFoundError: No module named 'datasets'; "
        f"programs run with {sys.executable}: install it there"
    )
    assert "install it there" not in one_line("train.py", ImportError("cannot import name 'x'"))


@pytest.mark.parametrize("line", ["%matplotlib inline", "  !nvidia-smi"])
def test_what_a_notebook_left_in_a_script_is_said_to_be_of_a_notebook(line: str) -> None:
    with pytest.raises(SyntaxError) as left:
        compile(f"if True:\n{line}\n", "train.py", "exec")
    assert one_line("train.py", left.value).endswith("; a line with % or ! is of a notebook: take it out")
    with pytest.raises(SyntaxError) as other:
        compile("x = (1 2)\n", "train.py", "exec")
    assert "notebook" not in one_line("train.py", other.value)
    name = NameError("name 'get_ipython' is not defined")
    assert one_line("train.py", name).endswith("which were magics (%) and commands (!)")


def test_what_a_worker_raised_is_in_the_line() -> None:
    sent = 'Caught ValueError in DataLoader worker process 1.\nOriginal Traceback (most recent call last):\n  File "w.py", line 9\nValueError: corrupt\n'
    line = one_line("train.py", ValueError(sent))
    assert line == "train.py raised ValueError: Caught ValueError in DataLoader worker process 1: ValueError: corrupt"


def test_packages_are_found_wherever_the_path_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual environment that sees another one's packages, a folder that pip was given as its target: an error that torch raises there is torch's."""
    for name in ("libs", "project"):
        (tmp_path / name).mkdir()
        monkeypatch.syspath_prepend(str(tmp_path / name))
    (tmp_path / "libs" / "torch-2.13.0.dist-info").mkdir()
    package_folders.cache_clear()
    assert f"{tmp_path}/libs/" in package_folders()
    assert f"{tmp_path}/project/" not in package_folders()
    package_folders.cache_clear()


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        ("usage: x\nx: error: argument --epoch\n", "x: error: argument --epoch"),
        (
            'Error executing job\nTraceback (most recent call last):\n  File "a.py", line 1, in main\n    f()\nValueError: no data\n\nSet HYDRA_FULL_ERROR=1\n',
            "ValueError: no data",
        ),
        ("Traceback (most recent call last):\n  cut", "cut"),
        ("Try --help\n╭─ Error ──╮\n│ No such option:  │\n│ --epoch │\n╰───────╯\n", "No such option: --epoch"),
        ("+- Error --+\n| No such option |\n+-------+\n", "No such option"),
        ("", ""),
    ],
)
def test_the_error_that_a_program_printed_is_told(printed: str, said: str) -> None:
    assert line_that_says_most(printed.splitlines()) == said


@pytest.mark.parametrize(("arguments", "code", "is_told"), [([], 2, True), (["--lr", "x"], 2, False), ([], 1, False)])
def test_a_program_that_misses_its_arguments_is_told_where_they_go(
    arguments: list[str], code: int, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    line = ended_itself("train.py", code, "train.py: error: the following arguments are required: --data")
    assert ("--data; the program's own arguments go after -- (" in line) == is_told


def test_a_full_folder_for_temporary_files_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "\nOSError: [Errno 28] No space left on device"
    monkeypatch.setattr(trace, "_is_full", lambda folder: True)
    assert "set TMPDIR to a folder with room" in trace._death("train.py", NOT_CLOSED_IN, said)
    assert "TIGHTFIT_CONTAINMENT=python" in trace._death(
        "train.py", NOT_CLOSED_IN, "OSError: [Errno 1] Operation not permitted"
    )
    # Of too many namespaces the kernel says the same.
    monkeypatch.setattr(trace, "_is_full", lambda folder: False)
    assert "TIGHTFIT_CONTAINMENT=python" in trace._death("train.py", NOT_CLOSED_IN, said)
