"""Places in the module tree as seen from another place, for settings that are equal wherever they are meant alike."""

from collections.abc import Mapping
from typing import Any

from tightfit.errors import ApplyError


def relative_place(path: str, other: str) -> str:
    """The place `other` as seen from `path`: "+1" is the next child of the same list, "../+1" that of the list that has the parent, "mlp" a sibling.

    So that places which differ only in their number have equal settings.
    """
    own, its = path.split("."), other.split(".")
    common = next((i for i, (a, b) in enumerate(zip(own, its, strict=False)) if a != b), min(len(own), len(its)))
    own, its = own[common:], its[common:]
    if own and its and own[0].isdigit() and its[0].isdigit():
        its[0] = f"{int(its[0]) - int(own[0]):+d}"
    return "/".join([*([".."] * (len(own) - 1)), ".".join(its)])


def is_of_same_model(path: str, other: str) -> bool:
    """Whether two places are in the same model of the program: in one of the same class."""
    return path.partition(".")[0] == other.partition(".")[0]


def place_from(path: str, relative: str) -> str:
    """What `relative_place` was made of; `relative` itself where it is a whole path.

    Raises:
        ApplyError: it leads nowhere.
    """
    if is_of_same_model(path, relative):
        return relative
    *ups, rest = relative.split("/")
    parts = path.split(".")
    base, last = parts[: len(parts) - 1 - len(ups)], parts[len(parts) - 1 - len(ups) :]
    first, _, inside = rest.partition(".")
    if first[:1] in ("+", "-"):
        if not last or not last[0].isdigit() or not first[1:].isdigit():
            raise ApplyError(f"following={relative!r} leads nowhere from {path}")
        first = str(int(last[0]) + int(first))
    return ".".join([*base, first, *([inside] if inside else [])])


def following_of(where: str, settings: Mapping[str, Any]) -> str:
    """The place whose calls come after those of the place `where`, as a choice with these settings has it.

    Raises:
        ApplyError: it leads nowhere, or the choice has none.
    """
    if "following" not in settings:
        raise ApplyError(f"{where}: the plan does not say which block is following; make it anew", places=[where])
    return place_from(where, str(settings["following"]))
