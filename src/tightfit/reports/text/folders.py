"""Places in files without the folders that all of them share, which tell nothing and differ from machine to machine."""

from collections.abc import Callable, Iterable


def without_common_folder(places: Iterable[str]) -> Callable[[str], str]:
    """What leaves out the folder that the absolute ones of `places` (`/home/me/project/train.py:41`) have in common; others stay as they are."""
    folders = [place.replace("\\", "/").split("/")[:-1] for place in places if _is_absolute(place)]
    common: list[str] = []
    for parts in zip(*folders, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    prefix = "/".join([*common, ""]) if common else ""
    return lambda place: place.replace("\\", "/").removeprefix(prefix) if _is_absolute(place) else place


def _is_absolute(place: str) -> bool:
    return place.startswith("/") or place[1:3] in (":/", ":\\")
