"""Numbers on the command line: how many GPUs, one number or several, and counts with a letter."""

import re

from tightfit.errors import UsageError

_LETTERS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_MOST_GPUS = 1 << 20


def gpus_of(text: str) -> tuple[int, ...]:
    """The numbers that `--gpus` gives, rising: `64`, `8..512` (8, 16, 32 and so on, doubled, to 512) or `8,24,64`.

    Raises:
        UsageError: it is none of these.
    """
    span = re.fullmatch(r"\s*(\d{1,9})\s*\.\.\s*(\d{1,9})\s*", text)
    if span is not None and 0 < int(span[1]) <= int(span[2]) <= _MOST_GPUS:
        first, last = int(span[1]), int(span[2])
        doubled = [first]
        while 2 * doubled[-1] < last:
            doubled.append(2 * doubled[-1])
        return tuple(sorted({*doubled, last}))
    numbers = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"\d{1,9}", part) and 0 < int(part) <= _MOST_GPUS for part in numbers):
        raise UsageError(
            f"--gpus {text}: give the number of GPUs of all nodes together, 1 or more, or several: 8..512 (doubled each time) or 8,24,64"
        )
    return tuple(sorted({int(part) for part in numbers}))


def count_of(option: str, text: str) -> float:
    """The count that was given for `option`: `300B`, `1.5T`, `20000`.

    Raises:
        UsageError: it is no count above 0.
    """
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d*)?(?:e\d{1,2})?)\s*([a-zA-Z]?)\s*", text)
    factor = _LETTERS.get(match[2].lower()) if match else None
    if match is None or factor is None or not float(match[1]):
        raise UsageError(f"{option} {text}: give a count above 0, such as 300B or 1.5T")
    return float(match[1]) * factor
