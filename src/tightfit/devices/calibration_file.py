"""Writes the tables of a calibration as TOML, which the standard library (tomllib) can read but not write."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def to_toml(content: Mapping[str, Any], *, remark: str = "") -> str:
    """`content` - strings, numbers, booleans, lists of these, tables and lists of tables - as TOML, below `remark` as comment lines."""
    lines = [f"# {line}" for line in remark.splitlines()]
    _write(lines, (), content)
    return "\n".join(lines) + "\n"


def _write(lines: list[str], path: tuple[str, ...], table: Mapping[str, Any]) -> None:
    """Writes a table, its plain keys first: in TOML a key belongs to the table header above it."""
    # A list that is empty is written as a value, since a list of no tables would vanish.
    plain = {key: value for key, value in table.items() if not _is_table(value) and not _is_list_of_tables(value)}
    if path and (plain or not table):
        lines += ["", f"[{'.'.join(path)}]"]
    lines += [f"{key} = {_value(value)}" for key, value in plain.items()]
    for key, value in table.items():
        if _is_table(value):
            _write(lines, (*path, key), value)
        elif _is_list_of_tables(value):
            for row in value:
                lines += ["", f"[[{'.'.join((*path, key))}]]"]
                lines += [f"{name} = {_value(cell)}" for name, cell in row.items() if cell is not None]


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_list_of_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(map(_is_table, value))


def _value(value: Any) -> str:
    # bool first: True is an int in Python, and TOML's booleans are lower case.
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(_value, value)) + "]"
    # A basic string of TOML takes the escapes of JSON, and wants DEL escaped too.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _number(value: float) -> str:
    """Six digits are more than any of these measurements has."""
    text = f"{value:.6g}"
    # TOML tells 1 (integer) from 1.0 (float); `n` is for nan, `e` for 1e-05.
    return text if any(mark in text for mark in ".en") else f"{text}.0"
