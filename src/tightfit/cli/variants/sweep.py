"""`tightfit estimate --sweep`: one row for each combination of values."""

import dataclasses
import json as jsonlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tightfit.allocator.settings import AllocatorSettings
from tightfit.capture.targets.target_kinds import HuggingFaceConfig, parse_target
from tightfit.capture.trace_settings import TraceSettings
from tightfit.devices.calibration import Calibration
from tightfit.devices.device import Device
from tightfit.errors import UsageError
from tightfit.fit.available import Used, in_use, used_bytes_of
from tightfit.fit.combinations import Axis, SweepRow, combinations, sweep
from tightfit.reports.redacted import redacted
from tightfit.reports.text.sweep_table import write_sweep


def write_rows(
    target: str,
    specifications: Sequence[str],
    cards: Sequence[tuple[str, Device]],
    settings: AllocatorSettings,
    calibration: Calibration | None,
    *,
    arguments: Sequence[str],
    parameters: Sequence[str],
    options: Mapping[str, Any],
    known_options: Mapping[str, str],
    json: bool,
    redact: bool,
    used: Used,
    margin: str,
    tracing: TraceSettings,
) -> int:
    """Traces every combination of the axes, prints the rows, and returns the worst exit code. `known_options` are those of a Hugging Face config.

    Raises:
        UsageError: an axis is written wrongly, or names no option of the config.
    """
    started = time.monotonic()
    parsed = parse_target(target, arguments=arguments, parameters=parameters, options=options)
    axes = [Axis.parse(text) for text in specifications]
    if isinstance(parsed, HuggingFaceConfig):
        _check_options(axes, known_options)
    elif options:
        raise UsageError(f"{', '.join(options)}: only for a Hugging Face config, and {target} is your own code")
    each, rows = combinations(axes), list[SweepRow]()

    def shown(value: Any) -> Any:
        return redacted(value) if redact else value

    try:
        for row in sweep(target, parsed, cards, each, settings, calibration, used=used, margin=margin, tracing=tracing):
            rows.append(row)
            if json:
                elapsed = {"elapsed_seconds": round(time.monotonic() - started, 2)}
                # A line as soon as there is one: what was traced stays, also after an interrupt.
                sys.stdout.write(jsonlib.dumps(shown({"target": target} | row.to_json() | elapsed)) + "\n")
                sys.stdout.flush()
            elif sys.stderr.isatty():
                sys.stderr.write(f"\r\x1b[K{len(rows)} of {len(each) * len(cards)} rows\r")
    finally:
        if rows and not json:
            entries = [(shown(row.values), row.device, row.estimate, shown(row.reason)) for row in rows]
            taken = [(card, used_bytes_of(card, used)) for _, card in cards]
            notes = [f"{card.name}: {in_use(card, num_bytes)}" for card, num_bytes in taken if num_bytes]
            write_sweep(shown(target), entries, notes=notes, elapsed_seconds=time.monotonic() - started)
    for name in _without_effect(axes, rows):
        sys.stderr.write(f"tightfit: {name} makes no difference to the memory: does {shown(target)} use it?\n")
    return max(row.exit_code for row in rows)


def _check_options(axes: Sequence[Axis], known: Mapping[str, str]) -> None:
    for axis in axes:
        name = axis.name.replace("-", "_")
        if name not in known:
            raise UsageError(f"--sweep {axis.name}: a Hugging Face config has the options {', '.join(known)}")
        wrong = [value for value in axis.values if known[name] == "int" and not value.isdecimal()]
        wrong += [value for value in axis.values if known[name] == "bool" and value.lower() not in ("true", "false")]
        if wrong:
            raise UsageError(f"--sweep {axis.name}: '{wrong[0]}' is no value of it")


def _without_effect(axes: Sequence[Axis], rows: Sequence[SweepRow]) -> list[str]:
    """The axes whose values never changed a peak: a misspelt option that a script ignores looks like that."""
    found = []
    for axis in axes:
        groups: dict[tuple[str, ...], set[int]] = {}
        num_values = {row.values[axis.name] for row in rows if row.estimate is not None}
        for row in rows:
            if row.estimate is not None:
                others = (row.device, *(value for name, value in row.values.items() if name != axis.name))
                groups.setdefault(others, set()).add(row.estimate.peak.allocated_bytes)
        if len(num_values) > 1 and all(len(peaks) == 1 for peaks in groups.values()):
            found.append(axis.name)
    return found


def option_kinds(options: type) -> dict[str, str]:
    """The names of the fields of a class of options, each with `int`, `bool` or `str`."""
    kinds = {"int": "int", "bool": "bool"}
    return {
        field.name: next((kind for word, kind in kinds.items() if word in str(field.type)), "str")
        for field in dataclasses.fields(options)
    }
