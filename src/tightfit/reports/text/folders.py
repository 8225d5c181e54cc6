"""Removes the folder that all places have in common, which says nothing and differs from machine to machine."""

from collections.abc import Callable, Iterable


def without_common_folder(places: Iterable[str]) -> Callable[[str], str]:
    """A function that removes the common folder of the absolute `places` (`/home/me/project/train.py:41`); others stay as they are."""
    folders = [place.replace("\\", "/").split("/")[:-1] for place in places if _is_absolute(place)]
    common: list[str] = []
    for parts in zip(*folders, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    # With the separator, so that /home/me does not also match /home/mel.
    prefix = "/".join([*common, ""]) if common else ""
    return lambda place: place.replace("\\", "/").removeprefix(prefix) if _is_absolute(place) else place


def _is_absolute(place: str) -> bool:
    # Recordings from Windows are read on Linux too, so os.path, which knows one system only, does not help.
    return place.startswith("/") or place[1:3] in (":/", ":\\")
