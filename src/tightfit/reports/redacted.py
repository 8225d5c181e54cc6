"""Takes home folders out of what is shown, so that a report can be sent to somebody: `/home/jane/train.py:41` becomes `~/train.py:41`.

Home folders are known by where systems put them (`/home`, `/Users`, `C:\\Users`, `/root`, also below a mount point), and the one of this process
by its environment: a recording comes from another machine often.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

HOME = "~"
_SEPARATOR, _START, _END = r"[\\/]+", r"(?<![\w.~-])", r"(?=[\\/:;,\"'\s()\[\]<>|]|$)"
# Names of Windows and macOS have spaces, which a path that goes on tells from the words after it; those of Linux have none.
_WITH_SPACES = r"(?:[A-Za-z]:)?(?:[\\/]+[\w.@+-]+){0,3}?[\\/]+(?:Users|Documents and Settings)[\\/]+(?:[^\\/:;\"'<>|\n]+(?=[\\/])|[^\\/:;\"'<>|\s]+)"
_WITHOUT = r"(?:[\\/]+[\w.@+-]+){0,4}?[\\/]+home[\\/]+[^\\/:;,\"'\s()<>|]+"
_HOMES = re.compile(rf"{_START}(?:{_WITH_SPACES}|{_WITHOUT}|{_SEPARATOR}root){_END}")

_Value = TypeVar("_Value")


def redacted_text(text: str) -> str:
    """`text` with `~` in place of every home folder in it."""
    own = str(Path.home())
    if len(own) > 1:
        text = re.sub(rf"{_START}{re.escape(own)}{_END}", HOME, text)
    return _HOMES.sub(HOME, text)


def redacted(value: _Value) -> _Value:
    """The same data with `redacted_text` of every text in it: in tuples, lists, mappings and dataclasses. Arrays are left as they are."""
    changed: Any = value
    if isinstance(value, str):
        text = redacted_text(value)
        # Members of a StrEnum stay what they are.
        changed = value if text == value else text
    elif isinstance(value, tuple | list):
        parts = [redacted(part) for part in value]
        changed = tuple(parts) if isinstance(value, tuple) else parts
    elif isinstance(value, Mapping):
        changed = {redacted(key): redacted(part) for key, part in value.items()}
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changed = dataclasses.replace(value, **{name: redacted(part) for name, part in fields.items()})
    return changed
