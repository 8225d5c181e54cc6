"""The lengths of requests that a user expects: one pair of numbers, or a table of past requests."""

import csv
from collections.abc import Sequence
from pathlib import Path

from tightfit.errors import UsageError
from tightfit.errors.missing_files import no_file

_PROMPT = ("prompt", "context", "input", "request token")
_ANSWER = ("answer", "generated", "output", "response")

DEFAULT_LENGTHS = (1024, 128)
"""Those of vLLM's own benchmark (`vllm bench serve`, random), where the user names none."""


def default_lengths(limit: int) -> tuple[int, int]:
    """Tokens of prompt and answer where the user names none, of a request of at most `limit`."""
    return DEFAULT_LENGTHS if sum(DEFAULT_LENGTHS) <= limit else (max(1, limit - limit // 4), limit // 4)


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
    return [pair_of(parts, f"--lengths {text}")]


def columns_of_lengths(heading: Sequence[str]) -> tuple[int, int] | None:
    """The columns for the tokens of the prompt and of the answer by the names in the heading of a table; None where one is missing."""
    names = [name.lower() for name in heading]
    prompt, answer = (
        next((place for place, name in enumerate(names) if any(word in name for word in words)), None)
        for words in (_PROMPT, _ANSWER)
    )
    return None if prompt is None or answer is None else (prompt, answer)


def pair_of(parts: Sequence[str], where: str) -> tuple[int, int]:
    """Tokens of a prompt and of its answer, as text.

    Raises:
        UsageError: they are no numbers of tokens; the message begins with `where`.
    """
    try:
        prompt, answer = (int(part) for part in parts)
    except ValueError:
        raise UsageError(f"{where}: {', '.join(parts)} are no numbers of tokens") from None
    if prompt < 1 or answer < 0:
        raise UsageError(f"{where}: a prompt has at least one token, an answer none or more")
    return prompt, answer


def _of_table(path: Path) -> list[tuple[int, int]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.reader(file))
    except FileNotFoundError:
        raise UsageError(f"--lengths: {no_file(str(path))}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"--lengths {path}: {getattr(error, 'strerror', None) or 'it is no text'}") from error
    places = columns_of_lengths(rows[0]) if rows else None
    if places is None or len(rows) < 2:
        raise UsageError(
            f"--lengths {path}: it has no header with a column for prompts and one for answers, and rows below it"
        )
    return [
        pair_of([row[place] if place < len(row) else "" for place in places], f"--lengths {path}, line {line}")
        for line, row in enumerate(rows[1:], start=2)
        if row
    ]
