"""`%load_ext tightfit`: the magic is registered, and answers as the command line does, as HTML."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.null.history_runs import tape_of

import tightfit
from tightfit.integrations import jupyter
from tightfit.reports.html.fragment import _pieces, estimate_fragment


class FakeShell:
    """What a notebook hands to an extension."""

    def __init__(self) -> None:
        self.magics: dict[tuple[str, str], Callable[[str], Any]] = {}

    def register_magic_function(self, func: Callable[..., Any], magic_kind: str, magic_name: str) -> None:
        self.magics[magic_kind, magic_name] = func


@pytest.fixture
def tape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    tape_of([1 << 30, 2 << 30], [0, 1, -1, -2]).save("a run.npz")
    return "a run.npz"


def test_the_package_is_an_extension() -> None:
    shell = FakeShell()
    tightfit.load_ipython_extension(shell)
    assert shell.magics == {("line", "tightfit"): jupyter.tightfit}


def test_an_estimate_is_shown_as_html_and_as_a_line(tape: str) -> None:
    shown = jupyter.tightfit(f'estimate "{tape}" --device "RTX 4090" --device "RTX 4060"')
    assert shown is not None
    assert shown._repr_html_().count("toy.py:workload") == 2
    assert "3.00 GiB" in shown._repr_html_()
    assert "fits on NVIDIA GeForce RTX 4090: peak " in repr(shown)


def test_a_report_is_shown_as_the_page(tape: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = jupyter.tightfit(f'report "{tape}"')
    assert shown is not None
    assert shown._repr_html_().startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert Path("a-run.html").is_file()
    assert capsys.readouterr().err.startswith("wrote a-run.html (")


def test_what_else_a_command_says_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert jupyter.tightfit("devices 4090") is None
    assert "RTX 4090" in capsys.readouterr().out


def test_a_help_page_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert jupyter.tightfit("estimate --help") is None
    assert "--device" in capsys.readouterr().out


def test_words_are_split_as_the_system_writes_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    line = r"""estimate C:\work\gen.py:train -p "name=a b" '#1' """
    monkeypatch.setattr(jupyter, "_IS_WINDOWS", True)
    assert jupyter._words(line) == ["estimate", r"C:\work\gen.py:train", "-p", "name=a b", "#1"]
    monkeypatch.setattr(jupyter, "_IS_WINDOWS", False)
    assert jupyter._words(r"estimate a\ run.npz") == ["estimate", "a run.npz"]


@pytest.mark.parametrize("command", ["estimate none.npz --device 4090", "report none.npz --device 4090"])
def test_an_error_is_its_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert jupyter.tightfit(command) is None
    assert capsys.readouterr().err.startswith("tightfit: ")


def test_a_fragment_escapes_what_is_the_users_and_has_no_script() -> None:
    found = tightfit.estimate(tape_of([1 << 30], [0], lines=["<script>.py:1"]), "RTX 4060")
    markup = estimate_fragment(found.to_json() | {"target": "<img src=x>"})
    assert "&lt;script&gt;.py:1" in markup
    assert "&lt;img src=x&gt;" in markup
    assert "<script" not in markup
    assert "<img" not in markup
    assert markup.count("<div") == markup.count("</div>")
    assert found._repr_html_().startswith("<div style=")


def test_a_fragment_shows_all_categories() -> None:
    answer = tightfit.estimate(tape_of([100 << 20], [0]), "RTX 4060").to_json()
    answer["at_peak"] |= {"communication": 1 << 20, "nccl": 2 << 20, "another": 3 << 20}
    pieces = _pieces(answer)
    assert sum(piece.num_bytes for piece in pieces) == sum(answer["at_peak"].values())
