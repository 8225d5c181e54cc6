"""Parses the settings of a choice: in a plan that was written by hand, or given as arguments, they are strings."""

from typing import Any

from tightfit.errors import ApplyError

_VALUES = {True: True, False: False, "True": True, "False": False}


def parse_bool(name: str, value: Any) -> bool:
    """The setting `name` as a bool.

    Raises:
        ApplyError: `value` is neither.
    """
    if value not in _VALUES:
        raise ApplyError(f"{name}={value!r} is neither True nor False")
    return _VALUES[value]
