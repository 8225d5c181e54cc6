"""Places in a model that differ only by numbers, in one text."""

import re
from collections.abc import Iterator, Sequence


def place_words(paths: Sequence[str]) -> str:
    """`a.[0-2,5].b` for the paths a.0.b, a.1.b, a.2.b and a.5.b; `a.*.b.*` where they differ in more than one number."""
    varying = _varying(paths)
    if len(varying) != 1:
        return pattern_of(paths)
    # Ranges are only readable for one varying number; experts of layers vary in two.
    numbers = sorted(int(re.findall(r"\d+", path)[varying[0]]) for path in paths)
    return _with(paths[0], varying, f"[{','.join(_ranges(numbers))}]")


def pattern_of(paths: Sequence[str]) -> str:
    """The paths' text with `*` for each number in which they differ; those of a name that all have (`UNet2DModel`) stay."""
    return _with(paths[0], _varying(paths), "*")


def _varying(paths: Sequence[str]) -> list[int]:
    numbers = [re.findall(r"\d+", path) for path in paths]
    return [i for i in range(len(numbers[0])) if len({found[i] for found in numbers}) > 1]


def _with(path: str, varying: Sequence[int], word: str) -> str:
    texts = iter(range(len(re.findall(r"\d+", path))))
    return re.sub(r"\d+", lambda match: word if next(texts) in varying else match[0], path)


def _ranges(numbers: Sequence[int]) -> Iterator[str]:
    first = last = numbers[0]
    for number in [*numbers[1:], None]:
        if number is not None and number == last + 1:
            last = number
            continue
        yield str(first) if first == last else f"{first}-{last}"
        if number is not None:
            first = last = number
