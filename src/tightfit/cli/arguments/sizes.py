"""Sizes on the command line: an option's value with its unit, and a note where a unit had to be assumed."""

import sys
from typing import Annotated

from cyclopts import Parameter

from tightfit.devices.catalogue import find
from tightfit.errors import UsageError
from tightfit.units import GIB, format_bytes, lacks_unit, parse

Size = Annotated[str, Parameter(allow_leading_hyphen=True)]
"""A size as it was typed. `-3GiB` is a wrong size, and not an option that nobody knows."""


def with_unit(option: str, text: str) -> str:
    """The size that was given for `option`, with a unit; says on stderr that a bare number is taken as GiB.

    Raises:
        UsageError: it is no size; the message names the option.
    """
    _check(option, text)
    if not lacks_unit(text):
        return text
    sys.stderr.write(f"tightfit: {option} {text} has no unit; read as {text.strip()} GiB\n")
    return f"{text.strip()}GiB"


def _check(option: str, text: str) -> None:
    if text.startswith("--"):
        raise UsageError(f"{option} needs a size, such as {option} 22GiB")
    try:
        # What a share is a share of is known later; any number will do to see that it is one.
        parse(text, whole_bytes=GIB)
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from None


def budget_on(budget: str, device: str, used: str | int | None = None) -> str | None:
    """The value of `--budget` with a unit; None, which stands for all there is, where it is more than that. This is said on stderr.

    Raises:
        UsageError: it is no size, or there is no such GPU.
    """
    _check("--budget", budget)
    card = find(device)
    held = used if isinstance(used, int) else 0 if used is None else parse(used, whole_bytes=card.capacity_bytes)
    room = card.capacity_bytes - held
    # A card that others fill is refused later, with its figures.
    if budget.strip().endswith("%") or room <= 0 or parse(budget) <= room:
        return with_unit("--budget", budget)
    beside = f" beside the {format_bytes(held)} of others" if held else ""
    read = f" has no unit; read as {budget.strip()} GiB, it" if lacks_unit(budget) else ""
    sys.stderr.write(
        f"tightfit: --budget {budget}{read} is more than a process can use of {card.name}{beside}: planning for {format_bytes(room)}\n"
    )
    return None
