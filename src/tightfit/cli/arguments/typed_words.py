"""Command lines that mean something else than was meant, seen before they are parsed: a size of two words, a second program."""

import sys
from collections.abc import Sequence
from pathlib import Path

from tightfit.errors import UsageError

_SIZES = ("--budget", "--host", "--disk", "--used", "--memory")
_UNITS = {f"{prefix}{unit}" for prefix in "kmgt" for unit in ("", "b", "ib")} | {"b"}
_OF_ONE_PROGRAM = ("estimate", "plan", "run", "record", "doctor", "report")


def check_words(words: Sequence[str]) -> None:
    """Says on stderr that a second program is an argument of the first. `words` are those before `--`.

    Raises:
        UsageError: a size is two words, of which the second would be an argument of the program.
    """
    for option, number, unit in zip(words, words[1:], words[2:], strict=False):
        if option in _SIZES and number.replace(".", "", 1).isdigit() and unit.lower() in _UNITS:
            raise UsageError(f"{option} {number} {unit}: a size is one word, {option} {number}{unit}")
    match list(words[:3]):
        case [command, first, second] if command in _OF_ONE_PROGRAM and _is_program(first) and _is_program(second):
            sys.stderr.write(
                f"tightfit: {second} is passed to {first} as an argument: {command} takes one program; give each its own command\n"
            )
        case _:
            pass


def _is_program(word: str) -> bool:
    return word.endswith(".py") and Path(word).is_file()
