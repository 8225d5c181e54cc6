"""Options of a script of the user's: how their names are written, and where their values stand among its arguments."""

import re
from collections.abc import Sequence
from pathlib import Path

from tightfit.capture.targets.target_kinds import Script

# Those that make options of the names of parameters, with hyphens; others that do so take both forms (fire), or only underscores.
_MAKES_HYPHENS = re.compile(r"^\s*(?:import|from)\s+(?:typer|tyro|cyclopts)\b", re.MULTILINE)
_OVERRIDES = re.compile(r"^\s*(?:import|from)\s+hydra\b", re.MULTILINE)


def option_of(script: Script, name: str) -> str:
    """The option as the arguments or the script have it: with hyphens or underscores; as given if neither does. Of a program of hydra, which takes `name=value`, the name."""
    name = name.lstrip("-")
    forms = [f"--{form}" for form in dict.fromkeys((name, name.replace("_", "-"), name.replace("-", "_")))]
    given = [form for form in forms if any(a.partition("=")[0] == form for a in script.arguments)]
    path = Path(script.path)
    # One that is not there is refused where it is to be run.
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    written = [form for form in forms if re.search(rf"[\"']{re.escape(form)}[\"']", text)]
    made = [f"--{name.replace('_', '-')}"] if _MAKES_HYPHENS.search(text) else []
    overridden = [name] if _OVERRIDES.search(text) else []
    return [*given, *written, *made, *overridden, forms[0]][0]


def value_of(arguments: Sequence[str], option: str) -> str | None:
    """The value that the option has there (`--name VALUE` or `--name=VALUE`); None where it has none."""
    at = _position(arguments, option)
    return None if at is None else arguments[at].removeprefix(f"{option}=")


def with_option(arguments: Sequence[str], option: str, value: str) -> list[str]:
    """The arguments with that value: where the option stands already, else at their end."""
    found, at = list(arguments), _position(arguments, option)
    if at is None:
        return [*found, option, value] if option.startswith("-") else [*found, f"{option}={value}"]
    found[at] = f"{option}={value}" if found[at].startswith(f"{option}=") else value
    return found


def _position(arguments: Sequence[str], option: str) -> int | None:
    for at, argument in enumerate(arguments):
        if argument.startswith(f"{option}="):
            return at
        if argument == option and option.startswith("-") and at + 1 < len(arguments):
            return at + 1
    return None
