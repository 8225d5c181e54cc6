"""Takes home folders out of what is shown, so that a report can be sent to somebody: `/home/jane/train.py:41` becomes `~/train.py:41`.

Home folders are known by where systems put them (`/home`, `/Users`, `C:\\Users`, `/root`, also below a mount point; `/gpfs/home01`, `/mnt/users`, `/u` of
clusters), and those of this process by its environment and the system's list of users: a recording comes from another machine often.
"""

import contextlib
import dataclasses
import functools
import importlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

HOME = "~"
_SYSTEM = ("/usr", "/bin", "/sbin", "/dev", "/proc", "/nonexistent")
_SEPARATOR, _START, _END = r"[\\/]+", r"(?<![\w.~-])", r"(?=[\\/:;,\"'\s()\[\]<>|]|$)"
# Names of Windows and macOS have spaces, which a path that goes on tells from the words after it; those of Linux have none.
_WITH_SPACES = r"(?:[A-Za-z]:)?(?:[\\/]+[\w.@+-]+){0,3}?[\\/]+(?:Users|Documents and Settings)[\\/]+(?:[^\\/:;\"'<>|\n]+(?=[\\/])|[^\\/:;\"'<>|\s]+)"
_NAME, _PREFIX = r"[^\\/:;,\"'\s()<>|]+", r"(?:[\\/]+[\w.@+-]+)"
# Large sites sort homes by their first letter: /home/j/jane.
_LETTER = rf"(?:(?:{'|'.join(f'{letter}{_SEPARATOR}(?={letter})' for letter in 'abcdefghijklmnopqrstuvwxyz')})(?={_NAME}{_SEPARATOR}))?"
_WITHOUT = rf"{_PREFIX}{{0,4}}?{_SEPARATOR}home{_SEPARATOR}{_LETTER}{_NAME}"
# Of clusters: /gpfs/home01/jane, /mnt/users/jane, /u/jane. Such words name other folders too: what looks like a file there is none's home.
_ROOTS = rf"(?:{_PREFIX}{{0,4}}?{_SEPARATOR}home(?:s|dirs?|\d+)|{_PREFIX}{{0,2}}?{_SEPARATOR}users?|(?:{_SEPARATOR}global)?{_SEPARATOR}u\d*)"
_FILES = r"\.(?:py|npz|csv|toml|json|html|ya?ml|pickle|ipynb|txt|sh|so|pt)"
_OF_CLUSTERS = rf"{_ROOTS}{_SEPARATOR}{_LETTER}(?:{_NAME}(?={_SEPARATOR})|(?![\w.+-]+{_FILES}{_END}){_NAME})"
_HOMES = re.compile(rf"{_START}(?:{_WITH_SPACES}|{_WITHOUT}|{_OF_CLUSTERS}|{_SEPARATOR}root){_END}")

_Value = TypeVar("_Value")


def redacted_text(text: str) -> str:
    """`text` with `~` in place of every home folder in it."""
    return _HOMES.sub(HOME, _own_homes(os.environ.get("HOME", "")).sub(HOME, text))


@functools.lru_cache(maxsize=8)
def _own_homes(variable: str) -> re.Pattern[str]:
    """The homes of who runs this, wherever they are: what the environment says and what the system does, also where a link leads."""
    homes = {variable, str(Path.home())}
    # Windows has no such module, and a container may run as a user without a row.
    with contextlib.suppress(ImportError, KeyError):
        homes.add(importlib.import_module("pwd").getpwuid(os.getuid()).pw_dir)
    homes |= {os.path.realpath(home) for home in homes if home}
    # Of a service's user it may be a folder of the system: "/", "/nonexistent", "/usr/sbin".
    found = sorted((home for home in homes if len(Path(home).parts) > 1 and not home.startswith(_SYSTEM)), key=len)
    words = "|".join(re.escape(home) for home in reversed(found))
    return re.compile(rf"{_START}(?:{words}){_END}" if words else r"(?!)")


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
