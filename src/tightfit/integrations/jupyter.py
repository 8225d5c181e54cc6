"""`%tightfit` in a notebook: a command as on the command line, its answer shown in the cell.

    %load_ext tightfit
    %tightfit estimate model.py:train --device "RTX 4090"
    %tightfit report run.pickle

IPython is not needed to import this: the notebook hands itself over when it loads the extension.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from tightfit.reports.html.fragment import estimate_fragment, framed_page
from tightfit.reports.verdicts import verdict_of_answer
from tightfit.units import format_bytes

_IS_WINDOWS = os.name == "nt"


class Shell(Protocol):
    """The part of IPython's InteractiveShell that is used."""

    def register_magic_function(self, func: Callable[..., Any], magic_kind: str, magic_name: str) -> None:
        """Makes `%magic_name` call `func` with the rest of the line."""


class NotebookResult:
    """A result with an HTML form for notebooks (IPython's `_repr_html_`) and a text form for terminals."""

    def __init__(self, markup: str, text: str) -> None:
        self._markup = markup
        self._text = text

    def _repr_html_(self) -> str:
        return self._markup

    def __repr__(self) -> str:
        return self._text


def load_ipython_extension(shell: Shell) -> None:
    """Registers the magic; `%load_ext tightfit` calls it."""
    shell.register_magic_function(tightfit, "line", "tightfit")


def tightfit(line: str) -> NotebookResult | None:
    """Runs `tightfit LINE`. An estimate and a report are shown as HTML; what else a command prints is printed."""
    words = _words(line)
    if words[:1] == ["estimate"] and "--json" not in words:
        return _estimate(words)
    if words[:1] == ["report"] and not any(word.startswith("--format") for word in words):
        return _report(words)
    sys.stdout.write(_run(words).stdout)
    return None


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    # There a backslash is between the folders of a path.
    if _IS_WINDOWS:
        lexer.escape = ""
    return list(lexer)


def _estimate(words: list[str]) -> NotebookResult | None:
    # A script's own arguments come after --, ours before.
    at = words.index("--") if "--" in words else len(words)
    said = _run([*words[:at], "--json", *words[at:]]).stdout
    # A help page, or nothing: the command failed then, and has said why on stderr.
    if not said.startswith("{"):
        sys.stdout.write(said)
        return None
    answers = [json.loads(answer) for answer in said.splitlines()]
    return NotebookResult("".join(map(estimate_fragment, answers)), "\n".join(map(_in_a_line, answers)))


def _in_a_line(answer: dict[str, Any]) -> str:
    return f"{answer['target']} {verdict_of_answer(answer)[0]} on {answer['device']['name']}: peak {format_bytes(answer['peak']['device_bytes'])}"


def _report(words: list[str]) -> NotebookResult | None:
    wrote = [line for line in _run(words).stderr.splitlines() if line.startswith(("wrote ", "replaced "))]
    if not wrote:
        return None
    # The path is read off the line on stderr: stdout is kept for data.
    page = Path(wrote[-1].partition(" ")[2].rpartition(" (")[0]).read_text(encoding="utf-8")
    return NotebookResult(framed_page(page), wrote[-1])


def _run(words: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process of its own, so that the notebook's state is left alone, and forwards its stderr."""
    done = subprocess.run([sys.executable, "-m", "tightfit", *words], capture_output=True, text=True, check=False)
    sys.stderr.write(done.stderr)
    return done
