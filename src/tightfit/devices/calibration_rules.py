"""The schema of a calibration file, table by table, and one line for each key that is wrong.

A figure is a whole number of bytes, a fraction of a peak, a time, a rate or a ratio, or a list of these; `TABLES` says which. Files of schema 1
have the first four tables only.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from tightfit.devices.device import DTYPES

SCHEMA = 2
READ_SCHEMAS = (1, 2)

OperatorClass = Literal[
    "matmul",
    "convolution",
    "attention",
    "normalisation",
    "normalisation_backward",
    "elementwise",
    "reduction",
    "embedding",
    "copy",
    "optimizer",
    "other",
]
OPERATOR_CLASSES: tuple[OperatorClass, ...] = get_args(OperatorClass)
FIXED_COSTS: tuple[str, ...] = ("launch", "ramp", "issue", "python")
LIBRARIES: tuple[str, ...] = ("cublas", "cublaslt", "cudnn")
CONTEXT_KEYS = ("num_bytes", "low_bytes", "high_bytes")

Rule = tuple[str, Callable[[Any], bool]]


def _is_number(value: Any) -> bool:
    # tomllib reads true and false as bool, which Python counts among the integers.
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_list(value: Any, test: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and bool(value) and all(map(test, value))


def _is_bytes(value: Any) -> bool:
    return _is_number(value) and isinstance(value, int) and value >= 0


def _is_rate(value: Any) -> bool:
    return _is_number(value) and value > 0


_BYTES: Rule = ("a whole number of bytes", _is_bytes)
_FRACTION: Rule = ("a fraction above 0, at most 1", lambda value: 0 < value <= 1)
# A launch or a latency of a second and more is a value in another unit.
_SECONDS: Rule = ("a time in seconds, from 0 to below 1", lambda value: 0 <= value < 1)
_RATE: Rule = ("a number above 0", lambda value: value > 0)
_COUNT: Rule = ("a whole number above 0", lambda value: isinstance(value, int) and value > 0)
_SIZES: Rule = ("a list of whole numbers of bytes", lambda value: _is_list(value, _is_bytes))
_RATES: Rule = ("a list of numbers above 0", lambda value: _is_list(value, _is_rate))
_LISTS = (_SIZES, _RATES)

TABLES: Mapping[str, Mapping[str, Rule]] = {
    "context": dict.fromkeys((*CONTEXT_KEYS, "init_bytes", *(f"{library}_bytes" for library in LIBRARIES)), _BYTES),
    "workspaces": {"cublas_bytes": _BYTES, "cublaslt_bytes": _BYTES},
    "efficiency": dict.fromkeys(OPERATOR_CLASSES, _FRACTION),
    "seconds": dict.fromkeys(FIXED_COSTS, _SECONDS),
    "link": {
        "latency_seconds": _SECONDS,
        **{
            f"{way}_{kind}_bytes_per_second": _RATE
            for kind in ("registered", "pinned", "pageable", "both_ways")
            for way in ("to_card", "from_card")
        },
    },
    "overlap": dict.fromkeys(
        ("product_beside_to_card", "product_beside_from_card", "to_card_beside_product", "from_card_beside_product"),
        _RATE,
    ),
    "allocation": {"sizes_bytes": _SIZES, "allocate_seconds": _RATES, "free_seconds": _RATES},
    "host": {
        "register_seconds_per_gib": _RATE,
        "adamw_threads": _RATES,
        "adamw_parameters_per_second": _RATES,
        "adamw_beside_copies_parameters_per_second": _RATES,
    },
    "disk": {
        "read_bytes_per_second": _RATE,
        "write_bytes_per_second": _RATE,
        "num_threads": _COUNT,
        "block_bytes": _COUNT,
    },
}
_OF_SCHEMA_1 = ("context", "workspaces", "efficiency", "seconds")
MEASURED_KEYS = ("name", "unit", "median", "low", "high", "num_samples", "predicted")


def faults(content: Mapping[str, Any]) -> list[str]:
    """One line for each fault in the content of a calibration file; empty if it is valid."""
    schema = content.get("schema")
    if schema not in READ_SCHEMAS:
        read = " and ".join(map(str, READ_SCHEMAS))
        return [f"schema = {schema!r} is not one that this version reads ({read})"]
    found = []
    if not isinstance(content.get("device"), str):
        found.append(f"device = {content.get('device')!r} must be the name of the card")
    if not isinstance(content.get("virtual", False), bool):
        found.append(f"virtual = {content['virtual']!r} must be true or false")
    tables = [name for name in TABLES if schema > 1 or name in _OF_SCHEMA_1]
    # Unknown tables are refused rather than skipped: a misspelt [effciency] would leave the catalogue's figures in place unnoticed.
    for name, table in content.items():
        if name in ("schema", "device", *(("virtual",) if schema > 1 else ())):
            continue
        if name == "made" and schema > 1:
            found += _made_faults(table)
        elif name == "measured" and schema > 1:
            found += _measured_faults(table)
        elif name not in tables or not isinstance(table, dict):
            found.append(f"unknown key '{name}'; the tables are {', '.join(tables)}")
        else:
            found += [fault for key, value in table.items() if (fault := _value_fault(schema, name, key, value))]
    # These compare keys with each other, which makes sense once each of them is valid.
    return found or _context_faults(content.get("context")) + _length_faults(content)


def _value_fault(schema: int, table: str, key: str, value: Any) -> str | None:
    rules = TABLES[table]
    # [efficiency.bfloat16] is a table in a table; its keys follow the rules of the table without a dtype, as schema 1 has it.
    if table == "efficiency" and schema > 1 and key in DTYPES and isinstance(value, dict):
        inner = (_value_fault(1, table, name, fraction) for name, fraction in value.items())
        return next((fault.replace("efficiency", f"efficiency.{key}", 1) for fault in inner if fault), None)
    if key not in rules:
        return f"unknown key '{table}.{key}'; it has {', '.join(rules)}"
    says, test = rules[key]
    if rules[key] not in _LISTS and not _is_number(value):
        return f"{table}.{key} = {value!r} must be a number"
    return None if test(value) else f"{table}.{key} = {value!r} must be {says}"


def _context_faults(context: Any) -> list[str]:
    if context is None:
        return []
    missing = [key for key in CONTEXT_KEYS if key not in context]
    if missing:
        return [f"context.{missing[0]} is missing; a context needs all of {', '.join(CONTEXT_KEYS)}"]
    if not context["low_bytes"] <= context["num_bytes"] <= context["high_bytes"]:
        return ["context must have low_bytes <= num_bytes <= high_bytes"]
    return []


def _length_faults(content: Mapping[str, Any]) -> list[str]:
    """Lists of one table belong together row by row, so they must have the same length."""
    found = []
    for name in ("allocation", "host"):
        lengths = {key: len(value) for key, value in content.get(name, {}).items() if isinstance(value, list)}
        if len(set(lengths.values())) > 1:
            found.append(f"{name}: {', '.join(lengths)} must be lists of one length")
    return found


def _made_faults(table: Any) -> list[str]:
    if isinstance(table, dict) and all(isinstance(value, str) for value in table.values()):
        return []
    return ["made must be a table of texts"]


def _measured_faults(rows: Any) -> list[str]:
    if not isinstance(rows, list):
        return ["measured must be a list of tables: [[measured]]"]
    for index, row in enumerate(rows):
        missing = [key for key in MEASURED_KEYS[:-1] if key not in row]
        unknown = sorted(set(row) - set(MEASURED_KEYS))
        if missing or unknown:
            return [f"measured[{index}] must have {', '.join(MEASURED_KEYS)}; see {', '.join(missing + unknown)}"]
    return []
