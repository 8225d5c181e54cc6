"""Requests and when they arrive: of a trace of past ones, or drawn at a rate.

A trace is a CSV with a header; the public traces of Azure's language models have `TIMESTAMP,ContextTokens,GeneratedTokens`.
"""

import csv
import dataclasses
import datetime
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tightfit.errors import UsageError
from tightfit.errors.missing_files import no_file
from tightfit.serving.load.lengths import columns_of_lengths, pair_of
from tightfit.tape import Column

_TIME = ("timestamp", "time", "arrival")
_SECONDS = re.compile(r"\d+(\.\d+)?([eE][+-]?\d+)?")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Requests in the order that they arrive: seconds since the first, tokens of prompts and of answers (at least 1), each of shape (n,)."""

    seconds: Column
    prompts: Column
    answers: Column

    def __len__(self) -> int:
        return len(self.seconds)

    def lengths_within(self, limit: int) -> list[tuple[int, int]]:
        """Tokens of prompt and answer of the requests that an engine takes which allows `limit` tokens; it ends their answers there."""
        pairs = zip(self.prompts.tolist(), self.answers.tolist(), strict=True)
        return [(prompt, min(answer, limit - prompt)) for prompt, answer in pairs if prompt < limit]

    @property
    def rate(self) -> float:
        """Requests per second between the first and the last; 0 where all come at once."""
        span = float(self.seconds[-1] - self.seconds[0]) if len(self) > 1 else 0.0
        return (len(self) - 1) / span if span else 0.0


def served_lengths(
    lengths: Sequence[tuple[int, int]], arrivals: Arrivals | None, limit: int | None, limit_of: str
) -> Sequence[tuple[int, int]]:
    """Tokens of prompt and answer of the requests that a server is for which allows `limit` tokens (None: any number): `lengths`, or where there are none those of `arrivals` that it takes.

    Raises:
        UsageError: one of `lengths` is longer, or each prompt of `arrivals` is.
    """
    if lengths or arrivals is None:
        longest = max((prompt + answer for prompt, answer in lengths), default=0)
        if limit is not None and longest > limit:
            raise UsageError(f"--lengths: a request of {longest:,} tokens is longer than {limit_of}, {limit:,}")
        return lengths
    if limit is None:
        return list(zip(arrivals.prompts.tolist(), arrivals.answers.tolist(), strict=True))
    found = arrivals.lengths_within(limit)
    if not found:
        raise UsageError(f"--arrivals: every prompt is as long as {limit_of}, {limit:,}, or longer: each is refused")
    return found


def limit_words(max_model_len: int | None) -> str:
    """What the limit is of: the user's `max_model_len`, or the model."""
    return "the model's positions" if max_model_len is None else "--max-model-len"


def read_arrivals(path: Path) -> Arrivals:
    """The requests of a CSV with columns for the time (seconds, or a date and time), the tokens of the prompt and those of the answer, sorted by time.

    Raises:
        UsageError: the file cannot be read, has no such columns or no rows, or has something else in one; the message says where.
    """
    where = f"--arrivals {path}"
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.reader(file)
            heading = next(rows, [])
            places = columns_of_lengths(heading)
            time = next((at for at, name in enumerate(heading) if any(word in name.lower() for word in _TIME)), None)
            if places is None or time is None:
                raise UsageError(
                    f"{where}: it has no header with columns for the time, the prompt and the answer, such as TIMESTAMP,ContextTokens,GeneratedTokens"
                )
            found = [
                (_seconds(_cell(row, time), f"{where}, line {rows.line_num}"), *pair_of([_cell(row, place) for place in places], f"{where}, line {rows.line_num}"))
                for row in rows
                if any(cell.strip() for cell in row)
            ]  # fmt: skip
    except FileNotFoundError:
        raise UsageError(f"--arrivals: {no_file(str(path))}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{where}: {getattr(error, 'strerror', None) or 'it is no CSV'}") from error
    if not found:
        raise UsageError(f"{where}: it has no rows below its header")
    table = np.array(found)
    return _in_order(table[:, 0], table[:, 1].astype(np.int64), table[:, 2].astype(np.int64))


def drawn_arrivals(lengths: Sequence[tuple[int, int]], rate: float, number: int, *, seed: int = 0) -> Arrivals:
    """`number` requests whose lengths are drawn from `lengths`, at times of a Poisson process with `rate` per second; infinity: all at once.

    Raises:
        UsageError: the rate is not positive, or there are no requests.
    """
    if not rate > 0:
        raise UsageError(f"--rate {rate:g}: give requests per second, more than 0")
    if number < 1:
        raise UsageError(f"--requests {number}: simulate at least one")
    random = np.random.default_rng(seed)
    pairs = np.array(lengths, dtype=np.int64)[random.integers(len(lengths), size=number)]
    gaps = random.exponential(1.0, size=number) / rate
    gaps[0] = 0.0
    return _in_order(np.cumsum(gaps), pairs[:, 0], pairs[:, 1])


def _in_order(seconds: Column, prompts: Column, answers: Column) -> Arrivals:
    order = np.argsort(seconds, kind="stable")
    sorted_seconds = seconds[order] - seconds[order[0]]
    # A model answers with one token at least.
    return Arrivals(seconds=sorted_seconds, prompts=prompts[order], answers=np.maximum(1, answers[order]))


def _cell(row: Sequence[str], place: int) -> str:
    return row[place].strip() if place < len(row) else ""


def _seconds(text: str, where: str) -> float:
    if _SECONDS.fullmatch(text):
        return float(text)
    try:
        at = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"{where}: {text or 'nothing'} is no time; write seconds, or 2023-11-16 18:15:46.68") from None
    return (at if at.tzinfo else at.replace(tzinfo=datetime.UTC)).timestamp()
