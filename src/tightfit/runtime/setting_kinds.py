"""What the settings of our techniques hold, so that a plan that was edited is refused with one line that names the setting.

A setting of a name holds the same in every technique. A plan that was written by hand, or given as arguments, may have numbers and conditions as text.
"""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any

from tightfit.errors import ApplyError
from tightfit.techniques.technique import AbstractTechnique

# More of anything than there is: what a plan says is counted through in places.
_MOST = 1 << 62
# How alike (`difflib`) an unknown name is to a known one that was meant.
_ALIKE = 0.7


class _OfAnotherKind(Exception):
    """A value is not of the kind."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """`parse` gives the value, or raises `_OfAnotherKind`; `words` say what it takes."""

    words: str
    parse: Callable[[Any], Any]


def _whole(least: int, most: int = _MOST) -> _Kind:
    def parse(value: Any) -> int:
        number = int(value) if isinstance(value, str) and value.strip().isdecimal() else value
        if type(number) is not int or not least <= number <= most:
            raise _OfAnotherKind
        return number

    return _Kind(words=f"a whole number of {least} or more" if most == _MOST else f"{least} to {most}", parse=parse)


def _one_of(*choices: Any) -> _Kind:
    def parse(value: Any) -> Any:
        # 1 is no True, and a list is no key.
        found = [each for each in choices if type(each) is type(value) and each == value]
        found += [each for each in choices if isinstance(value, str) and str(each) == value]
        if not found:
            raise _OfAnotherKind
        return found[0]

    return _Kind(words=" or ".join(map(repr, choices)), parse=parse)


def _list_of(kind: _Kind, what: str) -> _Kind:
    def parse(value: Any) -> list[Any]:
        if not isinstance(value, list | tuple):
            raise _OfAnotherKind
        return [kind.parse(each) for each in value]

    return _Kind(words=f"a list of {what}", parse=parse)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _OfAnotherKind
    return value


def _share(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise _OfAnotherKind
    return float(value)


def _pair(value: Any) -> tuple[int, int]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise _OfAnotherKind
    return _NUMBER.parse(value[0]), _NUMBER.parse(value[1])


_TEXT = _Kind(words="text", parse=_text)
# Of tiles, chunks, parts and children: more of these than anything has are a mistake.
_COUNT, _POSITION, _NUMBER = _whole(1, 1 << 20), _whole(0, 1 << 20), _whole(0)
_FLAG = _one_of(True, False)
_KINDS: Mapping[str, _Kind] = {
    **dict.fromkeys(("num_tiles", "num_chunks", "num_parts", "num_blocks", "rank"), _COUNT),
    **dict.fromkeys(("begin", "end"), _POSITION),
    **dict.fromkeys(
        (
            "host_bytes",
            "disk_bytes",
            "card_bytes",
            "window_bytes",
            "at_once_bytes",
            "smallest_bytes",
            "least_elements",
        ),
        _NUMBER,
    ),
    **dict.fromkeys(("in_backward", "clips", "draws_anew", "without_gradients", "recomputed"), _FLAG),
    **dict.fromkeys(
        ("before", "following", "preceding", "alloc_conf", "loop", "format", "master", "library", "dtype"), _TEXT
    ),
    **dict.fromkeys(("modules", "blocks"), _list_of(_TEXT, "paths of modules")),
    "outputs": _list_of(_TEXT, "names"),
    "only_above": _list_of(_NUMBER, "numbers of elements"),
    "keep": _list_of(_POSITION, "positions"),
    "storages": _list_of(_Kind(words="", parse=_pair), "pairs of bytes and how many"),
    "share": _Kind(words="a share between 0 and 1", parse=_share),
    "bits": _one_of(4, 8),
    **dict.fromkeys(("tier", "weights"), _one_of("host", "disk")),
    "executor": _one_of("card", "host"),
    "gradients_in": _one_of("forward", "backward"),
    "kernel": _one_of("same", "fused", "foreach", "for-loop"),
    "rounding": _one_of("stochastic", "compensated"),
    "border": _one_of("before the forward", "after the forward", "before the optimizer", "after the optimizer"),
}


class Settings(dict[str, Any]):
    """The settings of a choice at `where`; a plan that was edited may lack one."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._where = where

    def __missing__(self, name: str) -> Any:
        raise ApplyError(f"{self._where}: the plan does not say what {name} is; make it anew", places=(self._where,))


def settings_of(technique: AbstractTechnique, where: str, given: Mapping[str, Any]) -> Settings:
    """The settings of a choice at `where`; those of a technique of somebody else's as they are.

    Raises:
        ApplyError: one holds something else than it should, or its name is misspelt.
    """
    if not type(technique).__module__.startswith("tightfit."):
        return Settings(where, given)
    found = Settings(where, {})
    for name, value in given.items():
        kind = _KINDS.get(name)
        near = difflib.get_close_matches(str(name), _KINDS, n=1, cutoff=_ALIKE) if kind is None else []
        if near:
            raise ApplyError(
                f"{where}: no technique has a setting {_shown(name)} (did you mean {near[0]}?); the plan was edited, make it anew",
                places=(where,),
            )
        try:
            found[name] = value if kind is None else kind.parse(value)
        except _OfAnotherKind:
            assert kind is not None
            raise ApplyError(
                f"{where}: {name} is {_shown(value)}, and takes {kind.words}; the plan was edited, make it anew",
                places=(where,),
            ) from None
    return found


def _shown(value: Any) -> str:
    told = repr(value)
    return told if len(told) <= 60 else f"{told[:57]}..."
