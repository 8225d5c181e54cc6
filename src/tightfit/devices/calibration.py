"""What was measured on one machine, in a file that replaces the figures of the catalogue.

A calibration is a TOML file with `schema = 1`, the name of the card, and any of these tables:

    [context]     num_bytes, low_bytes, high_bytes      memory of a process besides its tensors
    [workspaces]  cublas_bytes, cublaslt_bytes          scratch memory of the libraries
    [efficiency]  matmul = 0.79, copy = 0.9, ...        fraction of the peak that a class of operators reaches
    [seconds]     launch, ramp, issue                   fixed costs of an operator (see `tightfit.cost.roofline`)
"""

import dataclasses
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self, get_args

from tightfit.devices.device import Context, Device
from tightfit.errors import UsageError

SCHEMA = 1

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
FIXED_COSTS: tuple[str, ...] = ("launch", "ramp", "issue")

_TABLES: Mapping[str, tuple[str, ...]] = {
    "context": ("num_bytes", "low_bytes", "high_bytes"),
    "workspaces": ("cublas_bytes", "cublaslt_bytes"),
    "efficiency": OPERATOR_CLASSES,
    "seconds": FIXED_COSTS,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Measured figures; what was not measured is None or absent. Efficiencies are fractions of a peak, costs are in seconds."""

    device: str
    context: Context | None = None
    cublas_bytes: int | None = None
    cublaslt_bytes: int | None = None
    efficiency: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a calibration file.

        Raises:
            UsageError: the file cannot be read, or one line for every key of it that is wrong.
        """
        try:
            content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise UsageError(f"the calibration {os.fspath(path)} cannot be read: {error}") from error
        faults = _faults(content)
        if faults:
            raise UsageError("\n".join(f"{os.fspath(path)}: {fault}" for fault in faults))
        workspaces = content.get("workspaces", {})
        context = content.get("context")
        return cls(
            device=content["device"],
            context=None if context is None else Context(**context, is_measured=True),
            cublas_bytes=workspaces.get("cublas_bytes"),
            cublaslt_bytes=workspaces.get("cublaslt_bytes"),
            efficiency=content.get("efficiency", {}),
            seconds=content.get("seconds", {}),
        )

    def applied_to(self, device: Device) -> Device:
        """`device` with the measured context.

        Raises:
            UsageError: the calibration was made on another card.
        """
        if device.name != self.device:
            raise UsageError(
                f"the calibration was made on {self.device}, not on {device.name}; calibrate that card too"
            )
        return device if self.context is None else dataclasses.replace(device, context=self.context)


def _faults(content: Mapping[str, Any]) -> list[str]:
    if content.get("schema") != SCHEMA:
        return [f"schema = {content.get('schema')!r} is not the one that this version reads ({SCHEMA})"]
    faults = []
    if not isinstance(content.get("device"), str):
        faults.append(f"device = {content.get('device')!r} must be the name of the card")
    for name, table in content.items():
        if name in ("schema", "device"):
            continue
        if name not in _TABLES or not isinstance(table, dict):
            faults.append(f"unknown key '{name}'; the tables are {', '.join(_TABLES)}")
            continue
        faults += [fault for key, value in table.items() if (fault := _value_fault(name, key, value))]
    context = content.get("context")
    if isinstance(context, dict) and not faults:
        missing = [key for key in _TABLES["context"] if key not in context]
        if missing:
            faults.append(f"context.{missing[0]} is missing; a context needs all of {', '.join(_TABLES['context'])}")
        elif not context["low_bytes"] <= context["num_bytes"] <= context["high_bytes"]:
            faults.append("context must have low_bytes <= num_bytes <= high_bytes")
    return faults


def _value_fault(table: str, key: str, value: Any) -> str | None:
    if key not in _TABLES[table]:
        return f"unknown key '{table}.{key}'; it has {', '.join(_TABLES[table])}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{table}.{key} = {value!r} must be a number"
    if table == "efficiency" and not 0 < value <= 1:
        return f"{table}.{key} = {value!r} must be a fraction above 0, at most 1"
    if table in ("context", "workspaces") and not (isinstance(value, int) and value >= 0):
        return f"{table}.{key} = {value!r} must be a whole number of bytes"
    if table == "seconds" and not 0 <= value < 1:
        return f"{table}.{key} = {value!r} must be a time in seconds, from 0 to below 1"
    return None
