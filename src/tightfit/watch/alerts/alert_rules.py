"""What alerts are about, as a TOML file says it, and where they go."""

import dataclasses
import os
import tomllib
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tightfit.errors import UsageError
from tightfit.errors.missing_files import no_file
from tightfit.forecast.horizon import parse_horizon
from tightfit.units import GIB, parse

KINDS = ("threshold", "forecast", "growth", "driver")
_OF = ("card", "process")
_FILTERS = ("gpu", "user", "command", "container")
_RULE_KEYS = {"name", "kind", "of", "above", "for", "within", *_FILTERS}
_MAX_RULES = 100


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule. `kind` is what it is about:

    * `threshold`: used memory of each card or process (`of`) is at least `above_bytes`, or `above_share` of the card;
    * `forecast`: the bound of a card's next `within_seconds` is that high;
    * `growth`: a card or process grows steadily, by at least `above_bytes` an hour;
    * `driver`: the driver does not answer.

    It has to hold for `for_seconds` to fire, and not to hold for as long to be over. `filters` are a GPU's index, and parts of user, command and container.
    """

    name: str
    kind: str
    of: str = "card"
    above_bytes: int | None = None
    above_share: float | None = None
    for_seconds: float = 60.0
    within_seconds: float = 3600.0
    filters: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AlertSettings:
    """Rules, and where their notices go: a file of JSON lines, an address that takes JSON, a program with its arguments. Empty for none."""

    rules: tuple[Rule, ...]
    log: Path | None = None
    webhook: str = ""
    webhook_headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    command: tuple[str, ...] = ()


DEFAULT = AlertSettings(
    rules=(
        Rule(name="full", kind="threshold", above_share=0.98),
        Rule(name="full within the hour", kind="forecast", above_share=1.0),
        Rule(name="driver", kind="driver", for_seconds=30.0),
    )
)
"""Without a file: shown where the machine is shown."""


def read_alerts(path: Path) -> AlertSettings:
    """Reads a file of rules.

    Raises:
        UsageError: it cannot be read, or says what is not known; the message names the rule.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"--alerts: {no_file(str(path))}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--alerts {path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        return _settings(content)
    except UsageError as error:
        raise UsageError(f"--alerts {path}: {error}") from None


def _settings(content: Mapping[str, Any]) -> AlertSettings:
    _only(content, {"rule", "log", "webhook", "command"}, "the file")
    tables = content.get("rule", [])
    if not isinstance(tables, list) or not tables or len(tables) > _MAX_RULES:
        raise UsageError(f"write each rule as [[rule]], at least one and at most {_MAX_RULES}")
    rules = tuple(_rule(table, at) for at, table in enumerate(tables, 1))
    names = [rule.name for rule in rules]
    if len(set(names)) < len(names):
        raise UsageError("two rules have the same name")
    log, webhook, command = (_table(content, key) for key in ("log", "webhook", "command"))
    _only(log, {"file"}, "[log]")
    _only(webhook, {"url", "headers"}, "[webhook]")
    _only(command, {"arguments"}, "[command]")
    return AlertSettings(
        rules=rules,
        log=Path(os.path.expanduser(_text(log, "file", "[log]"))) if log else None,
        webhook=_url(_text(webhook, "url", "[webhook]")) if webhook else "",
        webhook_headers=_headers(webhook.get("headers", {})),
        command=_arguments(command) if command else (),
    )


def _rule(table: Any, at: int) -> Rule:
    where = f"rule {at}"
    if not isinstance(table, dict):
        raise UsageError("write each rule as [[rule]]")
    _only(table, _RULE_KEYS, where)
    name, kind = _text(table, "name", where), _text(table, "kind", where)
    where = f"rule {name!r}"
    if kind not in KINDS:
        raise UsageError(f"{where}: kind = {kind!r}; it is one of {', '.join(KINDS)}")
    of = table.get("of", "card")
    if of not in _OF or (of == "process" and kind in ("forecast", "driver")):
        raise UsageError(f"{where}: of = {of!r}; it is a card, or with kind threshold or growth a process")
    if ("above" in table) != (kind != "driver") and kind != "forecast":
        raise UsageError(f"{where}: above is what {kind} {'needs' if kind != 'driver' else 'does not take'}")
    above_bytes, above_share = _above(table.get("above", "100%" if kind == "forecast" else None), kind, where)
    seconds = {key: _seconds(table[key], key, where) for key in ("for", "within") if key in table}
    if "within" in seconds and kind != "forecast":
        raise UsageError(f"{where}: within is for kind forecast")
    return Rule(
        name=name,
        kind=kind,
        of=of,
        above_bytes=above_bytes,
        above_share=above_share,
        for_seconds=seconds.get("for", 60.0),
        within_seconds=seconds.get("within", 3600.0),
        filters=_filters(table, where),
    )


def _above(value: Any, kind: str, where: str) -> tuple[int | None, float | None]:
    if value is None:
        return None, None
    if not isinstance(value, str):
        raise UsageError(f'{where}: above is a text such as "95%" or "20GiB"')
    try:
        if value.strip().endswith("%") and kind != "growth":
            # Of a whole that is every card's own.
            return None, parse(value, whole_bytes=GIB) / GIB
        return int(parse(value)), None
    except UsageError as error:
        raise UsageError(f"{where}: above: {error}") from None


def _seconds(value: Any, key: str, where: str) -> float:
    if value == "0s" and key == "for":
        return 0.0
    try:
        found = parse_horizon(value if isinstance(value, str) else "")
    except UsageError:
        found = None
    if found is None or not found.is_time or not 1 <= found.count <= 7 * 86400:
        raise UsageError(f'{where}: {key} is a time such as "30s" or "10min", at most 7d')
    return found.count


def _filters(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    found = {key: table[key] for key in _FILTERS if key in table}
    for key, value in found.items():
        is_right = type(value) is int if key == "gpu" else isinstance(value, str)
        if not is_right:
            raise UsageError(f"{where}: {key} is {'a number' if key == 'gpu' else 'a text'}")
        if key != "gpu" and table.get("of", "card") == "card":
            raise UsageError(f"{where}: {key} is for rules of processes")
    return found


def _url(text: str) -> str:
    address = urllib.parse.urlsplit(text)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise UsageError(f"[webhook] url = {text!r}: write an address that begins with http:// or https://")
    return text


def _headers(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(
        isinstance(each, str) and each.isascii() and each.isprintable() for pair in value.items() for each in pair
    ):
        raise UsageError("[webhook] headers is a table of texts")
    return value


def _arguments(table: Mapping[str, Any]) -> tuple[str, ...]:
    value = table.get("arguments")
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(each, str) and "\0" not in each for each in value)
    ):
        raise UsageError("[command] arguments is a list of texts, the program first; there is no shell")
    return tuple(value)


def _table(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = content.get(key, {})
    if not isinstance(value, dict):
        raise UsageError(f"write [{key}]")
    return value


def _text(table: Mapping[str, Any], key: str, where: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{where}: {key} is missing")
    return value


def _only(table: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(set(table) - known)
    if unknown:
        raise UsageError(f"{where}: {unknown[0]} is not known; there are {', '.join(sorted(known))}")
