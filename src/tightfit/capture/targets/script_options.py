"""Options of a script of the user's: how their names are written, and where their values stand among its arguments."""

import re
from collections.abc import Sequence
from pathlib import Path

from tightfit.capture.targets.target_kinds import Script


def option_of(script: Script, name: str) -> str:
    """The option as the arguments or the script have it: with hyphens or underscores; as given if neither does."""
    name = name.lstrip("-")
    forms = [f"--{form}" for form in dict.fromkeys((name, name.replace("_", "-"), name.replace("-", "_")))]
    given = [form for form in forms if any(a.partition("=")[0] == form for a in script.arguments)]
    path = Path(script.path)
    # One that is not there is refused where it is to be run.
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    written = [form for form in forms if re.search(rf"[\"']{re.escape(form)}[\"']", text)]
    return [*given, *written, forms[0]][0]


def value_of(arguments: Sequence[str], option: str) -> str | None:
    """The value that the option has there (`--name VALUE` or `--name=VALUE`); None where it has none."""
    at = _position(arguments, option)
    return None if at is None else arguments[at].removeprefix(f"{option}=")


def with_option(arguments: Sequence[str], option: str, value: str) -> list[str]:
    """The arguments with that value: where the option stands already, else at their end."""
    found, at = list(arguments), _position(arguments, option)
    if at is None:
        return [*found, option, value]
    found[at] = f"{option}={value}" if found[at].startswith(f"{option}=") else value
    return found


def _position(arguments: Sequence[str], option: str) -> int | None:
    for at, argument in enumerate(arguments):
        if argument.startswith(f"{option}="):
            return at
        if argument == option and at + 1 < len(arguments):
            return at + 1
    return None
