"""The lengths of requests that a user expects: one pair of numbers, or a table of past requests."""

import csv
from collections.abc import Sequence
from pathlib import Path

from tightfit.errors import UsageError

_PROMPT = ("prompt", "context", "input")
_ANSWER = ("answer", "generated", "output")


def lengths_of(text: str) -> list[tuple[int, int]]:
    """Tokens of prompt and answer of each request: of `2000:300`, or of the rows of a CSV whose header has a column for each (`ContextTokens,GeneratedTokens` as in the
    traces of Azure, `prompt,answer`, `input_tokens,output_tokens`).

    Raises:
        UsageError: it is neither, or a number is none of tokens; the message says where.
    """
    if text.endswith(".csv"):
        return _of_table(Path(text))
    parts = text.split(":")
    if len(parts) != 2:
        raise UsageError(f"--lengths {text}: write tokens of prompt and answer as 2000:300, or name a .csv file")
    return [_pair(parts, f"--lengths {text}")]


def _of_table(path: Path) -> list[tuple[int, int]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--lengths {path}: {getattr(error, 'strerror', None) or 'it is no text'}") from error
    heading = [name.lower() for name in rows[0]] if rows else []
    places = [_column(heading, words) for words in (_PROMPT, _ANSWER)]
    if None in places or len(rows) < 2:
        raise UsageError(
            f"--lengths {path}: it has no header with a column for prompts and one for answers, and rows below it"
        )
    return [
        _pair(
            [row[place] if place is not None and place < len(row) else "" for place in places],
            f"--lengths {path}, line {line}",
        )
        for line, row in enumerate(rows[1:], start=2)
        if row
    ]


def _column(heading: Sequence[str], words: Sequence[str]) -> int | None:
    return next((place for place, name in enumerate(heading) if any(word in name for word in words)), None)


def _pair(parts: Sequence[str], where: str) -> tuple[int, int]:
    try:
        prompt, answer = (int(part) for part in parts)
    except ValueError:
        raise UsageError(f"{where}: {', '.join(parts)} are no numbers of tokens") from None
    if prompt < 1 or answer < 0:
        raise UsageError(f"{where}: a prompt has at least one token, an answer none or more")
    return prompt, answer
