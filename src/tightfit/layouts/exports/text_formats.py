"""Small mappings as TOML, YAML and shell, without a library: names, numbers, truth values, strings and lists of them."""

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_WIDTH = 110
# What ends a line or cannot be printed, in a comment or unescaped in a string: the script's name and arguments are anybody's.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")


class ShellText(str):
    """A word of a shell command that the shell is to expand."""

    __slots__ = ()


def comments(lines: Iterable[str]) -> str:
    """Lines as comments, wrapped between words."""
    found: list[str] = []
    for line in lines:
        row = ""
        for word in _UNPRINTABLE.sub(" ", line).split():
            if row and len(row) + 1 + len(word) > _WIDTH:
                found.append(row)
                row = word
            else:
                row += f" {word}" if row else word
        found.append(row)
    return "".join(f"# {row}".rstrip() + "\n" for row in found)


def toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables of plain values as TOML."""
    return "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {plain(value)}\n" for key, value in table.items())
        for name, table in tables.items()
    )


def yaml(values: Mapping[str, Any], indent: int = 0) -> str:
    """Nested mappings and lists as YAML."""
    pad, text = "  " * indent, ""
    for key, value in values.items():
        if isinstance(value, Mapping):
            text += f"{pad}{key}:\n{yaml(value, indent + 1)}"
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            # A mapping in a list begins on the line of its dash.
            text += f"{pad}{key}:\n" + "".join(
                f"{pad}- {yaml(each, indent + 1).removeprefix(pad + '  ')}" for each in value
            )
        else:
            text += f"{pad}{key}: {plain(value)}\n"
    return text


def plain(value: Any) -> str:
    """A value as JSON, in a form that YAML and TOML read as well."""
    text = json.dumps(value, ensure_ascii=False)
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def shell_line(command: Sequence[str]) -> str:
    """A command over several lines, a word on each."""
    return " \\\n    ".join(word if isinstance(word, ShellText) else shlex.quote(word) for word in command)
